"""Line charts as coordinates, for templates to draw. Knows numbers only.

44 .. 352 across and 188 .. 10 up are the plot, in a drawing of 400 by 220; what stands right of it are labels.
"""

import math
from typing import Any

POINTS = 400  # of a line: more are not told apart


def chart(title: str, series: dict[str, list[tuple[float, float]]], dots: bool = False) -> dict[str, Any] | None:
    """Lines as a drawing of 400 by 220, in plain types. None where there is no point.

    series: by its name, (x, y) of each point; of many points every n-th is drawn, and the last.
    """
    series = {name: thinned(points) for name, points in series.items() if points}
    xs, ys = ([point[axis] for points in series.values() for point in points] for axis in (0, 1))
    if not xs:
        return None
    across, up = ticks(0, max(xs)), ticks(min(ys), max(ys))
    left, right, low, high = across[0], max(max(xs), across[-1]), up[0], up[-1]

    def x(value: float) -> float:
        return round(44 + 308 * (value - left) / ((right - left) or 1), 1)

    def y(value: float) -> float:
        return round(188 - 178 * (value - low) / ((high - low) or 1), 1)

    lines: list[dict[str, Any]] = []
    label = -12.0
    for name, points in sorted(series.items(), key=lambda item: -item[1][-1][1]):  # from the top
        where = [(x(a), y(b)) for a, b in points]
        label = max(label + 12, where[-1][1] + 4)  # labels do not lie on each other
        lines.append(
            {
                "name": name,
                "style": list(series).index(name) % 4,
                "points": " ".join(f"{a},{b}" for a, b in where),
                "dots": where if dots or len(where) == 1 else [],
                "label_at": label,
            }
        )
    over = max(0, label - 192)
    for line in lines:
        line["label_at"] -= over
    ends = ", ".join(
        f"{f'{name}: ' if name else ''}{points[0][1]:.3g} to {points[-1][1]:.3g}" for name, points in series.items()
    )
    return {
        "title": title,
        "said": f"{title}, over tokens read. From first to last: {ends}",
        "across": [{"at": x(value), "label": short(value)} for value in across],
        "up": [{"at": y(value), "label": short(value)} for value in up],
        "series": lines,
    }


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    every = -(-len(points) // POINTS)
    return points if every <= 1 else [*points[:-1:every], points[-1]]


def ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers that enclose low and high."""
    span = (high - low) or abs(high) or 1.0
    rough = span / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    return [round(i * step, 12) for i in range(first, last + 1)]


def short(value: float) -> str:
    """12000 as 12k, 1500000 as 1.5M, 0.00025 as 2.5e-4: what has room beside an axis."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    if 0 < abs(value) < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.3g}"
