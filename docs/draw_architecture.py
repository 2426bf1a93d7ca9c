"""Draw docs/architecture.svg: how data flows through the folders of the package.

Run ``python docs/draw_architecture.py`` after a folder is added or renamed. What a folder answers is read
from the first line of its docstring.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path
from textwrap import wrap

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "capvid"

WIDTH, HEIGHT = 1172, 550
BOX = 142, 100  # width and height
# folder -> (x, y) of its upper left corner
FOLDERS = {
    "video": (30, 70),
    "backbones": (224, 70),
    "features": (418, 70),
    "captioners": (612, 70),
    "decoding": (806, 70),
    "output": (1000, 70),
    "hub": (30, 305),
    "checkpoints": (224, 305),
    "vlm": (418, 305),
    "datasets": (612, 305),
    "training": (806, 305),
    "metrics": (612, 425),
    "scoring": (806, 425),
    "distributed": (1000, 305),
    "cli": (1000, 425),
    "text": (30, 425),
    "utils": (224, 425),
}
BARS = {"pipeline": (30, 202, 1112, 56)}  # name -> x, y, width, height
ARROWS = [
    ("video", "backbones", "frames"),
    ("backbones", "features", "vectors"),
    ("features", "captioners", "(T, D)"),
    ("captioners", "decoding", "logits"),
    ("decoding", "output", "captions"),
    ("hub", "checkpoints", "files"),
    ("datasets", "training", "batches"),
    ("metrics", "scoring", "scores"),
]
STYLE = """
text { font: 13px Helvetica, Arial, sans-serif; fill: #1c2733; }
.name { font-weight: bold; font-size: 15px; }
.label { font-size: 11px; fill: #52606d; text-anchor: middle; }
.row { font-size: 12px; fill: #52606d; }
rect { fill: #f3f7fb; stroke: #7b93a8; rx: 8px; }
.bar { fill: #e3f1e7; stroke: #6fa37f; }
line { stroke: #52606d; stroke-width: 1.5; marker-end: url(#head); }
"""


def summary(module: str) -> str:
    """Return the first line of a module's docstring, or of a folder's."""
    path = PACKAGE / module / "__init__.py"
    tree = ast.parse((path if path.is_file() else PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").splitlines()[0]


def box(name: str, x: int, y: int, width: int, height: int, kind: str = "") -> list[str]:
    """Return a rectangle with a name and what it answers."""
    lines = wrap(summary(name).replace("``", ""), width=max(20, width // 7))
    parts = [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>']
    parts.append(f'<text class="name" x="{x + 10}" y="{y + 20}">{escape(name)}</text>')
    parts += [
        f'<text style="font-size:11px" x="{x + 10}" y="{y + 38 + 14 * row}">{escape(line)}</text>'
        for row, line in enumerate(lines[:5])
    ]
    return parts


def draw() -> str:
    """Return the picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#52606d"/></marker></defs>',
        f'<rect x="0" y="0" width="{WIDTH}" height="{HEIGHT}" style="fill:#ffffff;stroke:none"/>',
        '<text class="row" x="30" y="40">The path of one clip, from a video file to its caption</text>',
        '<text class="row" x="30" y="290">Sources of captioners, training, scoring, large runs</text>',
    ]
    for name, (x, y) in FOLDERS.items():
        parts += box(name, x, y, *BOX)
    for name, (x, y, width, height) in BARS.items():
        parts += box(name, x, y, width, height, "bar")
    for source, target, label in ARROWS:
        x, y = FOLDERS[source][0] + BOX[0], FOLDERS[source][1] + BOX[1] // 2
        end = FOLDERS[target][0]
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end - 2}" y2="{y}"/>')
        parts.append(f'<text class="label" x="{(x + end) // 2}" y="{y - 7}">{escape(label)}</text>')
    for name in ("video", "backbones", "features", "captioners", "decoding", "output"):
        x, y = FOLDERS[name][0] + BOX[0] // 2, FOLDERS[name][1] + BOX[1]
        parts.append(f'<line x1="{x}" y1="202" x2="{x}" y2="{y + 3}"/>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (DOCS / "architecture.svg").write_text(draw(), encoding="utf-8")
