"""A process of its own to simulate in: where tests run, TRITON_INTERPRET is set, and Triton makes no Gluon kernels."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from importlib import import_module
from typing import Any

SERVE = "from simulators.gluon_sim.worker import serve; serve()"


class Worker:
    """Calls functions there. It keeps what it has lowered, so start one and call it often.

    It sees the modules that this process sees. Arguments, results and exceptions are pickled.
    """

    def __init__(self) -> None:
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # tiles are small, and threads only fight
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", SERVE], env=env, stdin=pipe, stdout=pipe)

    def call(self, function: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call "module:function" there; return what it returns, raise what it raises."""
        assert self.process.stdin and self.process.stdout
        try:
            pickle.dump((function, args, kwargs), self.process.stdin)
            self.process.stdin.flush()
            result, error, trace = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError):
            raise RuntimeError(f"the worker ended with {self.process.wait()} in {function}") from None
        if error is not None:
            raise error from RuntimeError(trace)
        return result

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve() -> None:
    """What the process does until its input ends. Prints go to stderr, since stdout carries the answers."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answers.write(_answer(function, args, kwargs))
        answers.flush()


def _answer(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        module, _, name = function.partition(":")
        return pickle.dumps((getattr(import_module(module), name)(*args, **kwargs), None, ""))
    except Exception as error:
        trace = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps((None, error, trace))
