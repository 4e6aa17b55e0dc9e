"""Recognising a call that is like a recent one by a single native check.

To ask tensors one by one for all that decides how a call is carried out costs the host a quarter of the call.
The guards of torch.compile compare it in C++ at once: type, dtype, device, sizes, strides, requires_grad, and the
dispatch keys, with those that modes and transforms set for the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import forward_ad

from tk_kernel_core.launch import is_planning
from tk_kernel_core.registration import takes_operator

GUARDS_TORCH_VERSIONS = ("2.11.", "2.13.")
"""Releases of torch for whose guards this was written and tested. They are no public interface; others do without."""

PlanT = TypeVar("PlanT")

_is_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_guards_for: Any = torch._C._dynamo.guards.TensorGuards


class RecentPlans(Generic[PlanT]):
    """Plans of direct calls, for which `takes_operator` is false, by form and tensors."""

    KEPT = 4
    """Plans of one form: looking through more of them costs as much as it saves."""

    FORMS = 256

    def __init__(self) -> None:
        self._plans: dict[Hashable, tuple[tuple[Callable[..., bool], PlanT], ...]] = {}

    def find(self, form: Hashable, tensors: tuple[Any, ...]) -> PlanT | None:
        """Return the plan of a recent call like this one, or None. Whatever the arguments are, nothing is raised.

        Args:
            form: Everything about the call but its tensors, also which of them are left out.
            tensors: All that are not left out, each once: the same tensor in two places is a form of its own.
        """
        if _is_compiling() or _dispatch_modes() or forward_ad._current_level >= 0:
            return None
        try:
            for is_like, plan in self._plans[form, _grad_enabled()]:
                if is_like(*tensors):
                    return plan
        except (KeyError, TypeError):
            # No call of this form yet; or no hash, of which the one who checks arguments has more to say.
            pass
        return None

    def remember(self, form: Hashable, tensors: tuple[torch.Tensor, ...], plan: PlanT) -> PlanT:
        """Keep the plan of a direct call that `find` did not know, and return it.

        Args:
            form: As for `find`.
            tensors: As for `find`; they are not kept.
            plan: Right for every direct call with this form and with tensors of the same properties, wherever
                their elements lie.
        """
        # What is planned for meta tensors depends on whether launches are being planned.
        if torch.__version__.startswith(GUARDS_TORCH_VERSIONS) and not any(tensor.is_meta for tensor in tensors):
            guards = _guards_for(
                *tensors,
                dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
            )
            if not guards.check(*tensors):
                # The same tensor twice, which the guards are not for.
                return plan
            key = form, _grad_enabled()
            if key not in self._plans and len(self._plans) >= self.FORMS:
                self._plans.clear()
            self._plans[key] = ((guards.check, plan), *self._plans.get(key, ())[: self.KEPT - 1])
        return plan

    def call(
        self,
        name: str,
        operands: tuple[Any, ...],
        settings: tuple[Hashable, ...],
        check: Callable[..., None],
        plan_of: Callable[..., PlanT],
        operator: Callable[..., Any],
    ) -> Any:
        """Carry out a function: by the plan of a call like it, by a new plan, or by the operator.

        Args:
            name: Of the function.
            operands: Tensors, or None for those left out. A plan is a function of these.
            settings: What else there is to say. All that follow take operands and settings.
            check: Raises errors for arguments that the function does not take.
            plan_of: Returns the plan.
            operator: The registered operator.
        """
        tensors = tuple(operand for operand in operands if operand is not None)
        form = name, settings, tuple(operand is None for operand in operands)
        plan: Any = self.find(form, tensors)
        if plan is None:
            if takes_operator(*tensors) or _has_no_data(operands[0]):
                if not torch.compiler.is_compiling():
                    # Before the dispatcher words the error; while compiling, the fake implementation checks.
                    check(*operands, *settings)
                return operator(*operands, *settings)
            plan = self.remember(form, tensors, plan_of(*operands, *settings))
        return plan(*operands)


def _has_no_data(operand: Any) -> bool:
    """Whether only the shapes of results are wanted, and not the launches either."""
    return isinstance(operand, torch.Tensor) and operand.is_meta and not is_planning()
