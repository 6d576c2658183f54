"""Draws docs/pictures/house.svg: the folders of the package on the floors that the import contract names.

python docs/tools/house.py          writes the picture
python docs/tools/house.py --check  ends with 1 if the picture is not the one of today's contract
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "house.svg"
PACKAGE = "langchain_dpicl"
CONTRACT = "Imports go down only, folder by folder"
WIDTH, ROW, BOX = 940, 54, 34
# What reads private records or spends has its own colours; everything else sees public values only.
FILLS = {"privacy": "#fdf3ec", "release": "#fdf3ec", "backends": "#eef4fa"}
STROKES = {"privacy": "#b3541e", "release": "#b3541e", "backends": "#2f6690"}


def floors() -> list[list[str]]:
    """Returns the folders by floor, from the top, as the import contract lists them."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == CONTRACT)
    return [
        [name.strip().removeprefix(PACKAGE + ".") for name in layer.replace(":", "|").split("|")] for layer in layers
    ]


def rooms(folder: str) -> list[str]:
    """Returns the folders inside a folder."""
    inside = ROOT / PACKAGE / folder
    return sorted(path.name for path in inside.glob("*/") if (path / "__init__.py").exists()) if inside.is_dir() else []


def drawn() -> str:
    """Returns the picture."""
    levels = floors()
    height = 46 + ROW * len(levels)
    fonts = 'font-family="system-ui, Segoe UI, DejaVu Sans, sans-serif" font-size="13"'
    legend = "imports go down only; orange: private records or budget; blue: models; grey: public values only"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" {fonts}>',
        "<title>The folders of the package: imports go down only</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        f'<text x="14" y="24" fill="#555555">{legend}</text>',
    ]
    for number, level in enumerate(levels):
        top = 40 + ROW * number
        each = (WIDTH - 28) / len(level)
        for place, folder in enumerate(level):
            left, wide = 14 + each * place, each - 8
            fill, stroke = FILLS.get(folder, "#f6f6f6"), STROKES.get(folder, "#999999")
            box = f'x="{left:.0f}" y="{top}" width="{wide:.0f}" height="{BOX}" rx="6"'
            out.append(f'<rect {box} fill="{fill}" stroke="{stroke}"/>')
            inside = rooms(folder)
            middle, line = left + wide / 2, top + (15 if inside else 21)
            name = folder if (ROOT / PACKAGE / folder).is_dir() else f"{folder}.py"
            out.append(f'<text x="{middle:.0f}" y="{line}" text-anchor="middle" fill="#222222">{escape(name)}</text>')
            if inside:
                place_of_text = f'x="{middle:.0f}" y="{top + 28}" text-anchor="middle" fill="#555555" font-size="10"'
                out.append(f"<text {place_of_text}>{escape(' · '.join(inside))}</text>")
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> int:
    """Writes the picture, or compares it."""
    picture = drawn()
    if "--check" in sys.argv:
        if PICTURE.exists() and PICTURE.read_text() == picture:
            return 0
        print(f"{PICTURE.relative_to(ROOT)} is not the picture of today's folders. Run: python docs/tools/house.py")
        return 1
    PICTURE.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
