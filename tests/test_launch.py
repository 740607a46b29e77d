"""What launchers get in the place of what Triton's JIT gets, and when they give way to Triton's own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hopper import CAUSAL, Call
from hopper_backward import head_dims, one_by_one, rows, upstream

from lazymax.backends.sm_90.backward_launch import HopperBackwardLaunch, Work
from lazymax.kernels import launch
from lazymax.kernels.launch import Address, launcher, plain, rebased, rebaser
from lazymax.kernels.memory import View
from lazymax.kernels.tma import describe

ROWS = rows()
SIZES = Call((2, 3, 3, 77, 200), {})


def bare(value: Any) -> Any:
    """An argument as the hardware gets it."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, tuple):
        return tuple(map(bare, value))
    return (value.base.data_ptr(), value.shape, value.strides) if hasattr(value, "strides") else value


@pytest.mark.parametrize("call", [Call((1, 4, 2, 330, 400), CAUSAL), Call((2, 5, 5, 300, 130), {}, "normal", "bshd")])
@pytest.mark.parametrize("index", range(len(ROWS)), ids=[row.name for row in ROWS])
def test_a_later_backward_gets_what_the_first_one_got(index: int, call: Call) -> None:
    (q, k, v), _, problem = call.inputs(head_dims(ROWS[index])[0], torch.bfloat16, 0)
    d_out, d_lse = upstream(call, q, v)
    made: HopperBackwardLaunch = one_by_one(ROWS[index], problem)
    out, lse, work = torch.empty_like(d_out), torch.empty(q.shape[:3]), made.work(q.device)
    tensors = (q, k, v, d_out), out, lse, d_lse, tuple(torch.empty_like(t) for t in (q, k, v))
    first = [arguments for _, _, arguments, _ in made.launches(*tensors, work)]
    assert made.plain is not None
    addresses = Work(*[None if t is None else Address(t.data_ptr()) for t in work])
    again = list(made._of_each(made.plain, *tensors, addresses, made.plain.modifiers))
    assert bare(tuple(first)) == bare(tuple(again))
    assert all(type(leaf) is tuple for arguments in again for leaf in arguments if isinstance(leaf, tuple))


def test_parts_of_the_memory_of_a_call_do_not_overlap() -> None:
    (q, *_), _, problem = SIZES.inputs(head_dims(ROWS[0])[0], torch.bfloat16, 0)
    made = one_by_one(ROWS[0], problem)
    parts = [t for t in made.work(q.device) if t is not None]
    for number, t in enumerate(parts):
        t.view(torch.int8).fill_(number)
    assert all((t.view(torch.int8) == number).all() for number, t in enumerate(parts))


def test_a_descriptor_of_another_tensor() -> None:
    one, other = torch.zeros(2, 3, 64, 64, dtype=torch.bfloat16), torch.ones(2, 3, 64, 64, dtype=torch.bfloat16)
    of = describe(one, 64, 64)
    for made in (rebased(of, other), rebaser(of)(other)):
        assert made.base is other and of.base is one
        assert all(getattr(made, name) == value for name, value in vars(of).items() if name != "base")


def test_plain() -> None:
    value = plain((View(1, 2, 3, View(4, 5, 6, 7)), (), None))
    assert value == ((1, 2, 3, (4, 5, 6, 7)), (), None) and type(value[0]) is type(value[0][3]) is tuple


def test_hooks_get_triton_s_own_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Built:
        function, packed_metadata = 7, (4, 1, 0)

        def run(self, *arguments: Any) -> None:
            seen.append(arguments)

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments: seen.append("usual")

    active = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: 100 + device)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    run, runtime = launcher(Built(), (2, 3, 4)), launch.knobs.runtime
    run("x")
    assert seen.pop() == (2, 3, 4, 103, 7, (4, 1, 0), None, None, None, "x")
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(runtime, name)
        hook.add(print)
        run("x")
        hook.remove(print)
        assert seen.pop() == "usual"
        monkeypatch.setattr(runtime, name, print)  # as it was before chains
        run("x")
        assert seen.pop() == "usual"
        monkeypatch.setattr(runtime, name, None)
        run("x")
        assert seen.pop() != "usual"
