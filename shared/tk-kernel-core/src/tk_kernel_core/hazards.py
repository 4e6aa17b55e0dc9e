"""Finding machine code in which the compiler overwrites what a matrix instruction still reads.

Hopper's wgmma is asynchronous: it reads its first operand, where that lies in registers, some time after it was
issued, until a wait says that its group is done. Triton 3.6 builds loops, mostly of a product whose first operand is
computed and which adds to its own result, in which ptxas gives those registers to other values too early. Such a
kernel gives wrong results, now and then. Nothing but the machine code shows it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)
_WIDTHS = {"256": 8, "128": 4, "64": 2, "WIDE": 2, "4": 4, "2": 2}
_WITHOUT_RESULT = re.compile(r"(ST|RED|BAR|EXIT|BRA|WARPSYNC|SYNCS|UTMA|\w*SETP|\w*VOTE)")
# A 64 x 16 tile of 16-bit, or 64 x 32 of 8-bit elements, over 128 threads.
_OPERAND_REGISTERS = 4
_MOST_GROUPS = 16


class _InFlight(NamedTuple):
    """Registers that are still read: by instructions of no group yet, and by groups, the latest one last."""

    open: frozenset[int] = frozenset()
    groups: tuple[frozenset[int], ...] = ()


class _Instruction(NamedTuple):
    address: int
    is_conditional: bool
    opcode: str
    operands: tuple[str, ...]


def overwritten_operands(listing: str) -> list[str]:
    """Return the instructions that write a register which a wgmma in flight may still read.

    Args:
        listing: Machine code as cuobjdump prints it, of one kernel. Every path through it is followed.
    """
    code = []
    for address, guard, opcode, text in _INSTRUCTION.findall(listing):
        operands = tuple(re.split(r",\s*", text.strip()))
        # A branch may have its condition among its operands.
        is_conditional = bool(guard) or (opcode.startswith("BRA") and len(operands) > 1)
        code.append(_Instruction(int(address, 16), is_conditional, opcode, operands))
    places = {instruction.address: index for index, instruction in enumerate(code)}
    found: dict[int, str] = {}
    waiting, seen = [(0, _InFlight())], set()
    while waiting:
        index, state = waiting.pop()
        # A state without anything in flight is left when the next wgmma is reached, whatever came before.
        while index < len(code) and (index, state) not in seen:
            seen.add((index, state))
            instruction = code[index]
            if any(_written(instruction) & registers for registers in (state.open, *state.groups)):
                found[index] = f"{instruction.opcode} {', '.join(instruction.operands)}".strip()
            state = _after(instruction, state)
            target = re.fullmatch(r".*\b0x([0-9a-f]+)", instruction.operands[-1])
            jumps = instruction.opcode.startswith("BRA") and target is not None
            if jumps and target is not None:
                waiting.append((places[int(target.group(1), 16)], state))
            if (jumps or instruction.opcode == "EXIT") and not instruction.is_conditional:
                break
            index += 1
    return [found[index] for index in sorted(found)]


def _after(instruction: _Instruction, state: _InFlight) -> _InFlight:
    if "GMMA" in instruction.opcode:
        operand = re.fullmatch(r"R(\d+)", instruction.operands[1])
        first = int(operand.group(1)) if operand else 0
        registers = state.open | frozenset(range(first, first + _OPERAND_REGISTERS) if operand else ())
        if "gsb0" in instruction.operands:
            groups = (*state.groups, registers)
            # A loop that never waits would have no end of them.
            return _InFlight(groups=groups if len(groups) <= _MOST_GROUPS else (groups[0] | groups[1], *groups[2:]))
        return state._replace(open=registers)
    if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
        pending = int(instruction.operands[-1], 16)
        return state._replace(groups=state.groups[-pending:] if pending else ())
    return state


def _written(instruction: _Instruction) -> frozenset[int]:
    """Return the registers that an instruction other than wgmma writes."""
    if "GMMA" in instruction.opcode or _WITHOUT_RESULT.match(instruction.opcode):
        return frozenset()
    results = [operand for operand in instruction.operands if not re.fullmatch(r"!?U?P\w+", operand)]
    register = re.fullmatch(r"R(\d+)", results[0]) if results else None
    if register is None:
        return frozenset()
    width = max((_WIDTHS.get(part, 1) for part in instruction.opcode.split(".")[1:]), default=1)
    return frozenset(range(int(register.group(1)), int(register.group(1)) + width))
