"""The hourglass: many callers, one interface, many stores. Parts that are designed but not yet built are dashed."""

from __future__ import annotations

from importlib.util import find_spec

from limitkeeper.charts.svg import Drawing

from .sheet import sheet

ENTRANCES = (
    ("request", "limitkeeper.web"),
    ("function call", "limitkeeper.limiter"),
    ("RESP command", "limitkeeper.service"),
    ("gRPC descriptor", "limitkeeper.service"),
    ("simulated arrival", "limitkeeper.simulate"),
)
STORES = (
    ("memory", "limitkeeper.stores.memory"),
    ("shared memory", "limitkeeper.stores.shared"),
    ("redis, valkey", "limitkeeper.stores.redis"),
    ("leased", "limitkeeper.stores.leased"),
    ("sharded", "limitkeeper.stores.sharded"),
    ("guarded", "limitkeeper.stores.guarded"),
)
RULES = (
    ("token bucket", "limitkeeper.algorithms.token_bucket"),
    ("leaky bucket", "limitkeeper.algorithms.leaky_bucket"),
    ("queue", "limitkeeper.algorithms.leaky_queue"),
    ("fixed window", "limitkeeper.algorithms.fixed_window"),
    ("sliding log", "limitkeeper.algorithms.sliding_log"),
    ("sliding counter", "limitkeeper.algorithms.sliding_counter"),
)
MIDDLE = 380.0


def hourglass() -> Drawing:
    drawing = sheet(
        "limitkeeper is an hourglass",
        "Every caller produces claims; every store returns a Decision. Each algorithm is implemented in one place.",
        514,
    )
    glass(drawing)
    chips(drawing, 102, ENTRANCES)
    floor(drawing, 168, "policy", "which limits apply to a request: identities become claims", "limitkeeper.policy")
    drawing.rect(MIDDLE - 122, 218, 244, 58, "blue veil", round=8)
    drawing.text(MIDDLE, 243, "Limiter, AsyncLimiter", "strong big", "middle")
    drawing.text(MIDDLE, 263, "claims in, a Decision out", "small", "middle")
    floor(drawing, 316, "store", "holds the state; reads, decides and writes in one step", "limitkeeper.stores")
    chips(drawing, 342, STORES)
    floor(drawing, 412, "algorithms", "pure functions on integers, compiled from the same source", "limitkeeper.algorithms")
    chips(drawing, 436, RULES)
    if dashed(ENTRANCES + STORES + RULES):
        drawing.text(730, 500, "dashed: designed, not built yet", "soft small", "end")
    return drawing


def glass(drawing: Drawing) -> None:
    """The outline: two bowls, mouth to mouth."""
    outline = (
        "M30 82C30 170 232 150 232 216L232 278C232 344 30 324 30 412L30 482"
        "L730 482L730 412C730 324 528 344 528 278L528 216C528 150 730 170 730 82Z"
    )
    drawing.put("path", "band", d=outline)
    drawing.put("path", "grid-line bold", d=outline)
    drawing.text(214, 252, "claims ↓", "soft small", "end")
    drawing.text(546, 252, "↑ Decision", "soft small")


def built(module: str) -> bool:
    """Whether this package exists."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def dashed(named: tuple[tuple[str, str], ...]) -> bool:
    return not all(built(module) for _, module in named)


def floor(drawing: Drawing, y: float, name: str, words: str, module: str) -> None:
    """A layer: its name and its purpose."""
    drawing.text(MIDDLE, y - 9, name if built(module) else f"{name} (to come)", "strong", "middle")
    drawing.text(MIDDLE, y + 8, words, "soft small", "middle")


def chips(drawing: Drawing, y: float, named: tuple[tuple[str, str], ...]) -> None:
    """Names in a row, around the middle."""
    widths = [16 + 7.2 * len(name) for name, _ in named]
    x = MIDDLE - (sum(widths) + 8 * (len(named) - 1)) / 2
    for (name, module), width in zip(named, widths, strict=True):
        drawing.rect(x, y, width, 26, "card", round=6)
        drawing.rect(x, y, width, 26, "soft-line thin" if built(module) else "soft-line thin dash", round=6)
        drawing.text(x + width / 2, y + 17, name, "small" if built(module) else "soft small", "middle")
        x += width + 8
