"""What several test modules share."""

import dataclasses

import pytest

from tk_swiglu import _plans
from tk_swiglu._launch import backward_config, forward_config


@pytest.fixture
def few_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give large tiles to the interpreter, which takes its time for each program, where values are what is tested."""

    def forward(*arguments: object) -> object:
        return dataclasses.replace(forward_config(*arguments), block=8192)

    def backward(n_rows: int, *arguments: object) -> object:
        return dataclasses.replace(backward_config(n_rows, *arguments), block_m=8, n_row_programs=-(-n_rows // 8))

    if device == "cpu":
        monkeypatch.setattr(_plans, "forward_config", forward)
        monkeypatch.setattr(_plans, "backward_config", backward)
