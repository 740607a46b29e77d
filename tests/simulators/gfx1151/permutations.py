"""Which lane each lane reads: the controls of DPP, and of ds_swizzle."""

import re
from collections.abc import Callable, Iterable

from .build import Dpp
from .errors import EmulationError

LANES = range(32)
MASKS = ("row_mask", "bank_mask", "bound_ctrl", "fi")
# Within a row of 16 lanes: index of the lane to read, given the lane's own index and the parameter.
ROW: dict[str, Callable[[int, int], int]] = {
    "row_shl": lambda lane, n: lane + n,
    "row_shr": lambda lane, n: lane - n,
    "row_ror": lambda lane, n: (lane - n) & 15,
    "row_mirror": lambda lane, n: 15 - lane,
    "row_half_mirror": lambda lane, n: (lane & 8) | (7 - (lane & 7)),
    "row_share": lambda lane, n: n,
    "row_newbcast": lambda lane, n: n,
    "row_xmask": lambda lane, n: lane ^ n,
}
DPP_KEYS = ("quad_perm", "dpp8", *ROW, *MASKS)


def _selected(key: str, value: str) -> list[int]:
    """Lane that each lane reads, -1 where that lies outside of its row."""
    if key in ("quad_perm", "dpp8"):
        choice = [int(item) for item in value.strip("[]").split(",")]
        within = len(choice) - 1
        return [lane & ~within | choice[lane & within] for lane in LANES]
    found = [ROW[key](lane & 15, int(value or "0", 0)) for lane in LANES]
    return [lane & 16 | at if 0 <= at < 16 else -1 for lane, at in zip(LANES, found, strict=True)]


def dpp_table(modifiers: Iterable[str]) -> Dpp:
    """Of modifiers such as "row_shr:1", "row_mask:0xf"."""
    masks, source = {"row_mask": 15, "bank_mask": 15, "bound_ctrl": 0, "fi": 0}, list(LANES)
    for modifier in modifiers:
        key, _, value = modifier.partition(":")
        if key in masks:
            masks[key] = int(value, 0)
        else:
            source = _selected(key, value)
    rows, banks = masks["row_mask"], masks["bank_mask"]
    enable = sum(1 << lane for lane in LANES if rows >> (lane >> 4) & 1 and banks >> ((lane & 15) >> 2) & 1)
    table = Dpp(enable=enable, bound_ctrl=masks["bound_ctrl"], fetch_inactive=masks["fi"])
    table.source[:] = source
    return table


def swizzle_offset(text: str) -> int:
    """The 16 bits that a ds_swizzle takes for "swizzle(SWAP,16)" or a number."""
    found = re.match(r"swizzle\((.*)\)", text)
    if not found:
        return int(text or "0", 0)
    kind, *parameters = (item.strip().strip('"') for item in found[1].split(","))
    if kind == "QUAD_PERM":
        return 0x8000 | sum(int(lane) << 2 * k for k, lane in enumerate(parameters))
    if kind == "BITMASK_PERM":  # and, or, xor of each bit of the lane, highest first
        bits = [{"p": (1, 0, 0), "0": (0, 0, 0), "1": (0, 1, 0), "i": (1, 0, 1)}[char] for char in parameters[0]]
        return sum(bit[k] << (4 - at) << 5 * k for at, bit in enumerate(bits) for k in range(3))
    if kind == "SWAP":
        return 31 | int(parameters[0]) << 10
    if kind == "REVERSE":
        return 31 | (int(parameters[0]) - 1) << 10
    if kind == "BROADCAST":
        return 32 - int(parameters[0]) | int(parameters[1]) << 5
    raise EmulationError(f"unsupported swizzle {found[1]}")
