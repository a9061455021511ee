"""Show what a search found: memory against time as a table, and the fastest option in a few lines."""

from __future__ import annotations

from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.search import Found
from ls_strategy.extras.planner.sizes import aligned, show_bytes


def front_table(found: Found) -> str:
    """Return the Pareto front, one line per option, the fastest first."""
    rows = [["", "device", "s per step", "sent in node", "between nodes", "bubble"]]
    for option in found.front:
        low, high = option.costs.seconds
        bubble = f"{option.costs.bubble:.1%}" if option.costs.bubble else "-"
        sent = [show_bytes(n) if n else "-" for n in (option.costs.total_in_node, option.costs.total_between_nodes)]
        rows.append([option.name, show_bytes(option.peak.device), f"{low:.3g} to {high:.3g}", *sent, bubble])
    head = f"memory against time, with a global batch of {found.global_batch:,} samples:"
    return "\n".join([head, *aligned(rows)])


def explanation(found: Found, hardware: Hardware) -> list[str]:
    """Explain the fastest option that fits in five lines."""
    tried = f"{len(found.traced)} ways to shard the layers in {found.seconds:.1f} s"
    if not found.options:
        closest = found.closest
        needs = "" if closest is None else f" {closest.name} comes closest, with {show_bytes(closest.peak.device)}."
        return [f"nothing fits.{needs} Searched {tried}. Use more ranks, a smaller batch, or offload."]
    best = found.front[0]
    active = best.peak.at_peak.get("activations", 0)
    states = sum(best.peak.at_peak.get(kind, 0) for kind in ("parameters", "masters", "gradients", "optimizer"))
    room = hardware.device_room
    bound = max(best.costs.parts.items(), key=lambda part: part[1])
    chosen = best.settings
    leanest = found.front[-1]
    return [
        f"{best.name}: the fastest of what fits, at most {best.costs.seconds[1]:.3g} s per step; searched {tried}.",
        f"memory: {show_bytes(best.peak.device)}"
        + ("" if room is None else f" of {show_bytes(room)}")
        + f", of that {show_bytes(states)} states and {show_bytes(active)} activations.",
        f"time: mostly {bound[0]} ({bound[1]:.3g} s without overlap), {best.costs.bubble:.1%} bubble.",
        f"least memory: {leanest.name}, {show_bytes(leanest.peak.device)}, at most {leanest.costs.seconds[1]:.3g} s.",
        f"set ZeROStrategy({', '.join(f'{k}={v!r}' for k, v in chosen['strategy'].items())}), "
        f"a batch size of {chosen['batch_size_per_replica']} and "
        f"accumulate_grad_batches={chosen['accumulate_grad_batches']}: the global batch stays "
        f"{found.global_batch:,}.",
    ]
