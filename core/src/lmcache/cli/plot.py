"""A line chart as SVG, small enough to need no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

__all__ = ["line_chart"]

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 130, 44, 52
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
_LABEL_STEP = 15


def line_chart(
    title: str, x_name: str, y_name: str, xs: Sequence[int], lines: Mapping[str, Sequence[float]]
) -> str:
    """``lines`` by name, each with a percentage for every one of ``xs``, which are set at equal distances."""
    top = next(t for t in (5, 10, 20, 40, 60, 80, 100) if t >= min(100.0, max(map(max, lines.values()))))
    parts = [_text(_LEFT, 24, title, "start", 15), _axes(x_name, y_name, xs, top)]
    labels = _spread({name: _y(values[-1], top) for name, values in lines.items()})
    for i, (name, values) in enumerate(lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        points = [(_x(n, len(xs)), _y(value, top)) for n, value in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in points]
        parts.append(_text(_WIDTH - _RIGHT + 12, labels[name] + 4, name, "start", 12, colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _axes(x_name: str, y_name: str, xs: Sequence[int], top: int) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for step in range(6):
        value = top * step / 5
        y = _y(value, top)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="{"#ddd" if step else "#333"}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{value:g}", "end", 12))
    parts += [_text(_x(n, len(xs)), bottom + 18, f"{x:,}", "middle", 12) for n, x in enumerate(xs)]
    parts.append(_text((_LEFT + right) / 2, bottom + 40, x_name, "middle", 12))
    parts.append(_text(_LEFT - 44, _TOP - 4, y_name, "start", 12))
    return "\n".join(parts)


def _x(n: int, count: int) -> float:
    width = _WIDTH - _LEFT - _RIGHT
    return _LEFT + (width * n / (count - 1) if count > 1 else width / 2)


def _y(value: float, top: int) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(value, top) / top


def _spread(ys: Mapping[str, float]) -> dict[str, float]:
    """Places for labels near ``ys``, from the lowest on up, each clear of the one below."""
    placed: dict[str, float] = {}
    below = float("inf")
    for name in sorted(ys, key=lambda name: -ys[name]):
        below = placed[name] = min(ys[name], below - _LABEL_STEP)
    return placed


def _text(x: float, y: float, text: str, anchor: str, size: int, colour: str = "#333") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"
