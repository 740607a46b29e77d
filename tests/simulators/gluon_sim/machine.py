"""The simulated machine: threads (one per partition), asynchronous engines and what orders their accesses.

Ordering is tracked with bit sets. Every agent (a thread, an in-order engine, the pending and the completed side of
a barrier) owns one bit; a remembered access, or the end of the last use of a named barrier, carries the set of agents
that are known to come after it. Releasing to an object adds the object's bit to everything the releaser sees; acquiring
adds the acquirer's bit to everything the object has. A conflicting access by an agent whose bit is missing is a race,
whatever the schedule happened to be.

The warps of a partition are one thread: the compiler puts the barriers between them. The two CTAs of a pair share the
bits, so that accesses of one to the memory of the other are ordered too. Not modelled: larger clusters, time.

Global memory has clocks instead (ordering.py), which go from agent to agent with the bits.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .barriers import MBarrier, NamedBarrier
from .errors import BarrierError, InFlightAtExit, SimError
from .global_memory import GlobalMemory
from .layouts import TMEM_COLUMN_BYTES, TMEM_COLUMNS
from .memory import Access, Event, Space
from .ordering import Actor, Clock, join
from .views import View

if TYPE_CHECKING:
    from .mlir import Op

Condition = Callable[[], bool]
Dims = tuple[int, int, int]
Steps = Generator["Condition | None", None, Any]


class Thread:
    """A partition of a warp-specialised kernel (or the whole program outside one)."""

    def __init__(self, cta: Cta, name: str, num_warps: int, env: list[Any]) -> None:
        self.cta, self.name, self.num_warps, self.env = cta, name, num_warps, env
        env[-1] = self
        self.bit = cta.new_bit()
        self.actor = cta.gmem.actor(cta.linear, True)
        cta.actors[self.bit], cta.clocks[self.bit] = self.actor, self.actor.clock
        self.executed = 0  # operations that are no pure ones
        self.poll: Poll | None = None  # the last one
        self.polling = False  # blocked is one
        self.gen: Steps | None = None
        self.blocked: Condition | None = None
        self.waiting_for = ""
        self.done = False
        self.op: Op | None = None  # operation being executed, for messages
        self.cp_async = Engine(cta, f"cp.async of {name}")
        self.bulk = Engine(cta, f"TMA stores of {name}")
        self.wgmma = Engine(cta, f"wgmma of {name}")
        self.tcgen05 = Engine(cta, f"tcgen05 of {name}")

    @property
    def where(self) -> str:
        return self.op.loc if self.op is not None else "?"

    def ready(self) -> bool:
        return not self.done and (self.blocked is None or self.blocked())


@dataclass(frozen=True)
class Poll:
    """An atomic that changed nothing, the thread's `number`-th operation. changed: whether anything is new there."""

    op: Op
    number: int
    addresses: bytes
    changed: Condition


class AsyncOp:
    """A deferred operation. `run` performs one piece and returns True when the operation is complete."""

    __slots__ = ("name", "records", "run", "seq", "snapshot", "thread", "where")

    def __init__(self, name: str, run: Callable[[], bool], thread: Thread, where: str) -> None:
        self.name, self.run, self.thread, self.where = name, run, thread, where
        self.records: list[Access] = []
        self.snapshot: list[Event] = []  # what the issuing thread was ordered after
        self.seq = 0


class Engine:
    """Executes asynchronous operations of one thread in issue order."""

    in_order = True

    def __init__(self, cta: Cta, name: str) -> None:
        self.cta, self.name = cta, name
        self.bit = cta.new_bit()
        self.queue: deque[AsyncOp] = deque()
        self.issued = 0
        self.completed = 0
        self.groups: list[int] = []  # `issued` at each commit_group

    def issue(self, op: AsyncOp) -> None:
        self.issued += 1
        op.seq = self.issued
        self.queue.append(op)
        self.cta.stats.async_ops += 1
        if self not in self.cta.engines:
            self.cta.engines.append(self)

    def step(self, position: int) -> None:
        """Perform a piece of the operation at `position` of the queue."""
        op = self.queue[position]
        with _Annotate(op.where, op.thread, f"while executing {op.name}"):
            if op.run():
                del self.queue[position]
                self.completed = op.seq if self.in_order else self.completed + 1

    def publish(self, upto: int, bit: int) -> None:
        """Make the completed accesses of operations up to `upto` visible to `bit`."""
        for space in self.cta.spaces:
            for rec in space.records:
                if rec.engine is self and rec.seq <= upto:
                    rec.vis |= bit


class Unordered(Engine):
    """Operations that may complete in any order (TMA loads, global writes of TMA stores)."""

    in_order = False


class _Annotate:
    """Context manager that adds location and thread to a SimError passing through."""

    def __init__(self, where: str, thread: Thread, note: str = "") -> None:
        self.where, self.thread, self.note = where, thread, note

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, exc: Any, tb: Any) -> None:
        if isinstance(exc, SimError):
            if exc.where is None:
                exc.where = self.where
            if not exc.context:
                exc.context.append(
                    f"in {self.thread.name}, {self.thread.cta.title}" + (f", {self.note}" if self.note else "")
                )


@dataclass
class Stats:
    """What one launch did."""

    steps: int = 0
    async_ops: int = 0
    programs: int = 0  # that were started
    cancelled: int = 0  # see operations/launch_control.py
    shared_bytes: int = 0
    tmem_columns: int = 0


class Cta:
    """One program instance, or one CTA of a pair that is one. `ctas`: those of the program, itself too."""

    def __init__(
        self,
        pid: Dims,
        grid: Dims,
        gmem: GlobalMemory,
        rng: random.Random,
        stats: Stats,
        *,
        pending: deque[Dims],
        smem_bytes: int,
        races: bool,
        first: Cta | None = None,
    ) -> None:
        self._bits = 0
        self.ctas: list[Cta] = first.ctas if first else []
        self.rank = len(self.ctas)
        self.ctas.append(self)
        self.pid, self.grid = pid, grid
        # Of a pair, each CTA owns what it writes.
        self.linear = (self.rank * grid[2] + pid[2]) * grid[1] * grid[0] + pid[1] * grid[0] + pid[0]
        self.gmem, self.rng, self.stats = gmem, rng, stats
        self.pending = pending  # programs of the launch that have not started
        self.smem = Space("shared", smem_bytes, races)
        self.tmem = Space("tensor", TMEM_COLUMNS * TMEM_COLUMN_BYTES, races)
        self.spaces: list[Space] = first.spaces if first else []  # of the pair
        self.spaces += [self.smem, self.tmem]
        self.ends: dict[NamedBarrier, Event] = first.ends if first else {}  # of the last use of each, of the pair
        # of global memory, see ordering.py: who a bit is, what a bit comes after, whose is all that is asynchronous,
        # and of that whose are TMA loads
        self.actors: dict[int, Actor] = first.actors if first else {}
        self.clocks: dict[int, Clock] = first.clocks if first else {}
        self.asynchronous, self.loading = (gmem.actor(self.linear, False) for _ in range(2))
        self.pace = 1.0  # how much more often it goes on than others that are resident
        self.cluster: NamedBarrier = first.cluster if first else NamedBarrier(self, "cluster barrier")
        self.barriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.threads: list[Thread] = []
        self.engines: list[Engine] = []
        self.loads = Unordered(self, "TMA loads")
        self.writes = Unordered(self, "global writes of TMA stores")
        self.requests = Unordered(self, "requests to cancel a program")
        self.refused = False  # an answer to one was read that said no
        self.allocs = 0

    @property
    def title(self) -> str:
        return f"program {self.pid}" + (f" CTA {self.rank}" if len(self.ctas) > 1 else "")

    def new_bit(self) -> int:
        first = self.ctas[0]
        first._bits += 1
        return 1 << (first._bits - 1)

    # ---- ordering

    def share(self, have: int, give: int) -> None:
        """Everything visible to `have` becomes visible to `give`."""
        for event in self._events():
            if event.vis & have:
                event.vis |= give
        if self.gmem.races:
            clock = self.actors[have].all_warps() if have in self.actors else self.clocks.get(have)
            if clock:
                join(self.clocks.setdefault(give, {}), clock)

    def loaded(self, bit: int) -> None:
        """A TMA load is complete, and `bit` comes after it."""
        if self.gmem.races:
            join(self.clocks.setdefault(bit, {}), self.loading.all_warps())

    def seen_by(self, bit: int) -> list[Event]:
        return [event for event in self._events() if event.vis & bit]

    def _events(self) -> Iterator[Event]:
        for space in self.spaces:
            yield from space.records
        yield from self.ends.values()

    def fence_async(self, thread: Thread) -> None:
        for rec in self.smem.records:
            if rec.proxy == "generic" and rec.vis & thread.bit:
                rec.fenced = True

    # ---- barriers

    def barrier(self, view: View) -> MBarrier:
        bar = self.barriers.get(view.address)
        if bar is None:
            raise BarrierError(f"{view.label} is used as an mbarrier but was not initialised (or was invalidated)")
        return bar

    def drop_barriers(self, view: View) -> None:
        """The compiler gave the memory of a dead allocation to `view`; idle mbarriers in it are gone."""
        lo, hi = int(view.offsets.min()), int(view.offsets.max()) + view.dt.nbytes
        for bar in [b for a, b in self.barriers.items() if lo <= a < hi]:
            if bar.pending != bar.count or bar.tx or bar.waiters:
                raise BarrierError(f"the memory of {bar.state()} is given to {view.label} while the barrier is in use")
            del self.barriers[bar.address]

    def named_barrier(self, ident: int) -> NamedBarrier:
        if ident not in self.named:
            self.named[ident] = NamedBarrier(self, f"named barrier {ident}")
        return self.named[ident]

    # ---- end of program

    def finish(self) -> None:
        self._check_exit()
        self.stats.shared_bytes = max(self.stats.shared_bytes, self.smem.peak)
        self.stats.tmem_columns = max(self.stats.tmem_columns, self.tmem.peak // TMEM_COLUMN_BYTES)

    def _check_exit(self) -> None:
        observers = 0
        for t in (t for cta in self.ctas for t in cta.threads):
            observers |= t.bit
        for space in (self.smem, self.tmem):
            if not space.races:
                continue
            for rec in space.records:
                if rec.engine is not None and not rec.vis & observers:
                    raise InFlightAtExit(f"the program ends although no thread has waited for {rec}", rec.where)
        for bar in self.barriers.values():
            if bar.tx < 0:
                raise BarrierError(f"more bytes arrived than were expected on {bar.state()}")
