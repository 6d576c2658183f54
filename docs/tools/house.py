"""Draws docs/pictures/house.svg: the folders of the package on the floors that the import contract names.

And house-tall.svg, the same for telephones, with two folders beside each other at most.

python docs/tools/house.py          writes both pictures
python docs/tools/house.py --check  ends with 1 if a picture is not the one of today's contract
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
PACKAGE = "langchain_dpicl"
CONTRACT = "Imports go down only, folder by folder"
ROW, BOX = 54, 34
# The width and how many folders stand beside each other.
SHAPES = {"house.svg": (940, 100), "house-tall.svg": (360, 2)}
# Letters of the names of rooms are about so wide.
LETTER = 5.9
# What reads private records or spends has its own colours; everything else sees public values only.
FILLS = {"privacy": "#fdf3ec", "release": "#fdf3ec", "backends": "#eef4fa"}
STROKES = {"privacy": "#b3541e", "release": "#b3541e", "backends": "#2f6690"}


def floors() -> list[list[str]]:
    """Returns the folders by floor, from the top, as the import contract lists them."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == CONTRACT)
    return [[name.strip() for name in layer.replace(":", "|").split("|")] for layer in layers]


def rooms(folder: str) -> list[str]:
    """Returns the folders inside a folder."""
    inside = ROOT / PACKAGE / folder
    return sorted(path.name for path in inside.glob("*/") if (path / "__init__.py").exists()) if inside.is_dir() else []


def lines_of(words: list[str], wide: float) -> list[str]:
    """Returns the names of rooms in lines that fit a box."""
    lines: list[str] = []
    for word in words:
        longer = f"{lines[-1]} · {word}" if lines else word
        if lines and len(longer) * LETTER <= wide:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def drawn(width: int, beside: int) -> str:
    """Returns the picture."""
    fonts = 'font-family="system-ui, Segoe UI, DejaVu Sans, sans-serif" font-size="13"'
    legend = ["imports go down only; orange: private records or budget;", "blue: models; grey: public values only"]
    top = 40 if beside > 2 else 74
    body = []
    said = [" ".join(legend)] if beside > 2 else ["imports go down only", *legend[0].split("; ")[1:], legend[1]]
    for number, line in enumerate(said):
        body.append(f'<text x="14" y="{(24 if beside > 2 else 18) + 17 * number}" fill="#555555">{line}</text>')
    for level in floors():
        for start in range(0, len(level), beside):
            shown = level[start : start + beside]
            each = (width - 28) / len(shown)
            inside = {folder: lines_of(rooms(folder), each - 13) for folder in shown}
            high = BOX + 14 * max(0, *(len(lines) - 1 for lines in inside.values()))
            for place, folder in enumerate(shown):
                left, wide = 14 + each * place, each - 5
                fill, stroke = FILLS.get(folder, "#f6f6f6"), STROKES.get(folder, "#999999")
                box = f'x="{left:.0f}" y="{top}" width="{wide:.0f}" height="{high}" rx="6"'
                body.append(f'<rect {box} fill="{fill}" stroke="{stroke}"/>')
                middle, line = left + wide / 2, top + (15 if inside[folder] else high / 2 + 4)
                name = folder if (ROOT / PACKAGE / folder / "__init__.py").is_file() else f"{folder}.py"
                at = f'x="{middle:.0f}" y="{line:.0f}" text-anchor="middle"'
                body.append(f'<text {at} fill="#222222">{escape(name)}</text>')
                for number, names in enumerate(inside[folder]):
                    at = f'x="{middle:.0f}" y="{top + 28 + 14 * number}" text-anchor="middle"'
                    body.append(f'<text {at} fill="#555555" font-size="10">{escape(names)}</text>')
            top += high + (ROW - BOX if start + beside >= len(level) else 8)
    height = top - 14
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" {fonts}>',
            "<title>The folders of the package: imports go down only</title>",
            f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def main() -> int:
    """Writes the pictures, or compares them."""
    stale = []
    for name, shape in SHAPES.items():
        picture, file = drawn(*shape), PICTURES / name
        if "--check" not in sys.argv:
            file.write_text(picture)
        elif not file.exists() or file.read_text() != picture:
            stale.append(name)
    for name in stale:
        print(f"docs/pictures/{name} is not the picture of today's folders. Run: python docs/tools/house.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
