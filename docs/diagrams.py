"""Draw the pictures of the documentation: `python docs/diagrams.py` writes docs/images/*.svg.

Plain SVG on a white card with a border: it reads the same on light and dark pages and needs nothing but a browser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK, SOFT, CARD = "#1f2933", "#7b8794", "#ffffff"
COLOURS = {  # what a part is for, the same colour in every picture: fill, border
    "plain": ("#f5f7fa", "#9aa5b1"),
    "stem": ("#e9e0f8", "#8a63d2"),
    "norm": ("#e4e7eb", "#7b8794"),
    "mixing": ("#d7e8fb", "#2f7ed8"),
    "ffn": ("#fde8cf", "#d9822b"),
    "scale": ("#d8f3dc", "#2d9d5c"),
    "pool": ("#fbdde3", "#cf4561"),
    "head": ("#fff3bf", "#c9a100"),
}
PALETTE = ("#2f7ed8", "#3a9ad9", "#35b0ab", "#2d9d5c", "#8ab833", "#e0b000", "#e8912d", "#dd5e4b", "#cf4561")
THREADS = [54 + 15 * i for i in range(len(PALETTE))]  # heights of the header's threads
Part = tuple[str, str]  # text, colour


def text_width(words: str, size: float) -> float:
    """An upper bound for the fonts named above."""
    return len(words) * size * 0.6


@dataclass
class Canvas:
    """A white card on which things are drawn in order."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, size: float = 14, colour: str = INK, anchor: str = "middle") -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, words: str, colour: str = "plain") -> None:
        """A rounded box with its text in the middle; text that would not fit stops the script."""
        lines = words.split("\n")
        assert max(text_width(line, 14) for line in lines) <= width, f"{words!r} does not fit into {width}"
        fill, border = COLOURS[colour]
        self.rect(x, y, width, height, fill, border)
        for i, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 + 17 * (i - (len(lines) - 1) / 2), line)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, border: str, extra: str = "") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" '
            f'stroke="{border}" stroke-width="1.5"{extra}/>'
        )

    def frame(self, x: float, y: float, width: float, height: float, words: str) -> None:
        """A dashed frame around what is repeated, with its label under it."""
        self.rect(x, y, width, height, "none", SOFT, ' stroke-dasharray="5 4"')
        self.text(x + width / 2, y + height + 17, words, 13, SOFT)

    def line(self, *points: tuple[float, float], arrow: bool = True) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5"{end}/>')

    def plus(self, x: float, y: float) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="{CARD}" stroke="{INK}" stroke-width="1.5"/>')
        self.line((x - 5, y), (x + 5, y), arrow=False)
        self.line((x, y - 5), (x, y + 5), arrow=False)

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="{FONT}" role="img">'
        )
        arrow = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0.5 L7.5 4 L0 7.5 z" fill="{INK}"/></marker></defs>'
        )
        card = (
            f'<rect x="1" y="1" width="{self.width - 2}" height="{self.height - 2}" rx="12" fill="{CARD}" '
            'stroke="#cbd2d9"/>'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", arrow, card, *self.parts, "</svg>"]) + "\n"


def box_width(words: str) -> float:
    return max(34.0, max(text_width(line, 14) for line in words.split("\n")) + 14)


def chain(canvas: Canvas, x: float, y: float, parts: list[Part], gap: float = 14) -> float:
    """Boxes in a row centred on `y`, joined by arrows; the x where the last one ends."""
    for i, (words, colour) in enumerate(parts):
        if i:
            canvas.line((x, y), (x + gap, y))
            x += gap
        height = 18 + 17 * len(words.split("\n"))
        canvas.box(x, y - height / 2, box_width(words), height, words, colour)
        x += box_width(words)
    return x


def residual(canvas: Canvas, x: float, y: float, branches: list[list[Part]]) -> float:
    """A shortcut along `y` and branches below it that are added to it; the x after the sum."""
    fork, start, step = x + 8, x + 28, 52
    ends = []
    for i, branch in enumerate(branches):
        row = y + step * (i + 1)
        canvas.line((fork, y if i == 0 else row - step), (fork, row), (start, row))
        ends.append((chain(canvas, start, row, branch), row))
    total = max(end for end, _ in ends) + 18
    for end, row in ends:
        canvas.line((end, row), (total, row), (total, y + 10))
    canvas.line((x, y), (total - 10, y))
    canvas.plus(total, y)
    return total + 9


def arrow_to(canvas: Canvas, x: float, y: float, length: float = 22) -> float:
    canvas.line((x, y), (x + length, y))
    return x + length


def block(canvas: Canvas, x: float, y: float, residuals: list[list[list[Part]]], label: str) -> float:
    """Residuals one after the other in a dashed frame; the x after them."""
    start = x
    for branches in residuals:
        x = residual(canvas, x, y, branches)
    end = x + 12
    canvas.line((x, y), (end, y), arrow=False)
    canvas.frame(start, y - 22, end - start, 52 * max(len(branches) for branches in residuals) + 56, label)
    return end


LN, FFN = ("LN", "norm"), ("FFN", "ffn")


def scale(words: str) -> Part:
    return (words, "scale")


def deit() -> Canvas:
    canvas = Canvas(800, 196, "DeiT: all tokens have positions; blocks of self-attention and FFN")
    canvas.box(16, 24, 114, 28, "class token", "pool")
    canvas.box(16, 60, 114, 28, "distill token", "pool")
    canvas.box(16, 96, 114, 28, "patches", "stem")
    for y in (38, 74, 110):
        canvas.line((130, y), (144, y), (144, 74), arrow=False)
    x = arrow_to(canvas, 144, 74, 14)
    x = arrow_to(canvas, chain(canvas, x, 74, [("+ positions", "stem")], 0), 74, 16)
    x = block(canvas, x, 74, [[[LN, ("attention", "mixing")]], [[LN, FFN]]], "× depth")
    x = chain(canvas, arrow_to(canvas, x, 74, 16), 74, [("LN", "norm")])
    canvas.line((x, 74), (x + 10, 74), (x + 10, 56), (x + 22, 56))
    canvas.line((x, 74), (x + 10, 74), (x + 10, 94), (x + 22, 94))
    canvas.box(x + 22, 40, 70, 32, "head", "head")
    canvas.box(x + 22, 78, 70, 32, "head ⚗", "head")
    return canvas


def deit3() -> Canvas:
    canvas = Canvas(780, 196, "DeiT III: positions on patches only, LayerScale in every residual")
    for y, words, colour in ((46, "class token", "pool"), (104, "patches\n+ positions", "stem")):
        x = chain(canvas, 16, y, [(words, colour)])
        canvas.line((x, y), (138, y), (138, 74), arrow=False)
    x = arrow_to(canvas, 138, 74, 18)
    x = block(canvas, x, 74, [[[LN, ("attention", "mixing"), scale("γ₁")]], [[LN, FFN, scale("γ₂")]]], "× depth")
    x = arrow_to(canvas, x, 74, 20)
    chain(canvas, x, 74, [("LN", "norm"), ("head", "head")])
    return canvas


def parallel() -> Canvas:
    canvas = Canvas(800, 240, "Parallel ViT: two attentions read the same tokens, then two FFNs do")
    x = arrow_to(canvas, chain(canvas, 16, 64, [("class\n+ patches", "stem")]), 64)
    attention = [[LN, (f"attention {p}", "mixing"), scale("γ₁")] for p in (1, 2)]
    feed = [[LN, (f"FFN {p}", "ffn"), scale("γ₂")] for p in (1, 2)]
    x = block(canvas, x, 64, [attention, feed], "× depth, here with P = 2 branches; γ only with LayerScale")
    x = arrow_to(canvas, x, 64, 20)
    chain(canvas, x, 64, [("LN", "norm"), ("head", "head")])
    return canvas


def hmlp() -> Canvas:
    canvas = Canvas(700, 150, "The hMLP stem: patches of 4, 8 and 16 pixels that never overlap")
    parts: list[Part] = [("image", "plain")]
    for kernel, last in (("4 × 4", False), ("2 × 2", False), ("2 × 2", True)):
        parts += [(f"conv\n{kernel}", "stem"), ("BN", "norm")]
        parts += [] if last else [("GELU", "plain")]
    x = chain(canvas, 16, 54, [*parts, ("tokens", "plain")], 15)
    assert x < canvas.width
    for x, words in ((122, "patches of 4"), (305, "patches of 8"), (488, "patches of 16")):
        canvas.text(x, 110, words, 13, SOFT)
    canvas.text(
        350,
        134,
        "each convolution's stride equals its kernel, so a token depends only on its own 16 × 16 pixels",
        13,
        SOFT,
    )
    return canvas


def cait() -> Canvas:
    canvas = Canvas(800, 342, "CaiT: a trunk of patches, then class-attention, which updates the class token only")
    x = arrow_to(canvas, chain(canvas, 16, 58, [("patches\n+ positions", "stem")]), 58)
    trunk = [[[LN, ("talking heads", "mixing"), scale("γ₁")]], [[LN, FFN, scale("γ₂")]]]
    x = block(canvas, x, 58, trunk, "trunk × depth: patches only, without the class token")
    chain(canvas, arrow_to(canvas, x, 58), 58, [("patches x", "stem")])
    attention: list[Part] = [LN, ("class-attention", "pool"), scale("γ₁")]
    pooling_stage(
        canvas, 222, "class token c", attention, "× 2: query from c, keys and values from [c, x]; x does not change"
    )
    return canvas


def pooling_stage(canvas: Canvas, y: float, query: str, attention: list[Part], label: str) -> None:
    """A token that reads the patches: its own shortcut along `y`, the patches into the branch below."""
    x = arrow_to(canvas, chain(canvas, 16, y, [(query, "pool")]), y)
    canvas.box(16, y + 35, box_width("patches x"), 35, "patches x", "stem")
    canvas.line((16 + box_width("patches x"), y + 52), (x + 12, y + 52), arrow=False)
    x = block(canvas, x, y, [[attention], [[LN, FFN, scale("γ₂")]]], label)
    chain(canvas, arrow_to(canvas, x, y, 18), y, [LN, ("head", "head")])


def resmlp() -> Canvas:
    canvas = Canvas(800, 176, "ResMLP: a Linear across patches, then an FFN across channels")
    x = arrow_to(canvas, chain(canvas, 16, 58, [("patches", "stem")]), 58, 18)
    blocks = [
        [[("Aff", "norm"), ("linear over\npatches", "mixing"), scale("γ₁")]],
        [[("Aff", "norm"), FFN, scale("γ₂")]],
    ]
    x = block(canvas, x, 58, blocks, "× depth")
    x = arrow_to(canvas, x, 58, 18)
    chain(canvas, x, 58, [("Aff", "norm"), ("mean", "pool"), ("head", "head")], 12)
    return canvas


def patchconvnet() -> Canvas:
    canvas = Canvas(800, 342, "PatchConvNet: convolutional residual blocks on the grid, pooled by attention")
    x = arrow_to(canvas, chain(canvas, 16, 58, [("conv\nstem", "stem")]), 58, 18)
    branch: list[Part] = [
        LN, ("1 × 1", "mixing"), ("GELU", "plain"), ("3 × 3\ndepth-wise", "mixing"), ("GELU", "plain"),
        ("SE", "mixing"), ("1 × 1", "mixing"), scale("γ₁"),
    ]  # fmt: skip
    x = block(canvas, x, 58, [[branch]], "trunk × depth, on the grid of patches; SE: squeeze-excite")
    chain(canvas, arrow_to(canvas, x, 58, 18), 58, [("patches x", "stem")])
    attention: list[Part] = [LN, ("attention", "pool"), scale("γ₁")]
    pooling_stage(canvas, 222, "query c", attention, "pooling stage × 1: one query, or one query per class")
    return canvas


def one_residual() -> Canvas:
    canvas = Canvas(640, 190, "The residual: x + drop(scale(branch(norm(x))))")
    canvas.text(40, 63, "x", 16)
    branch: list[Part] = [
        ("norm", "norm"),
        ("branch: attention,\nlinear, conv, FFN", "mixing"),
        ("scale", "scale"),
        ("drop path", "plain"),
    ]
    x = residual(canvas, 56, 58, [branch])
    x = arrow_to(canvas, x, 58, 30)
    canvas.text(x + 10, 63, "x′", 16)
    canvas.text(
        320, 168, "a block is a mixing residual (across patches), then an FFN residual (across channels)", 13, SOFT
    )
    return canvas


Row = list[tuple[str, str, str]]  # packages that stand side by side: name, contents, colour


def package() -> Canvas:
    """The packages of src/patchloom, those that import others above those that they import."""
    rows: list[Row] = [
        [("cli", "one file per command: parse, call, print", "plain")],
        [("serve", "HTTP service, web page", "plain"), ("exporting", "ONNX, OpenVINO, torch", "plain")],
        [("search", "index, ranking, gallery", "plain"), ("explaining", "maps, scores", "plain")],
        [("benching", "speed", "plain"), ("api.py", "training", "plain")],
        [("runs", "config, launch, resume, sequences, plan, list of runs", "head")],
        [("tasks", "registry; one folder per kind of learning", "head")],
        [("inference", "prediction, embeddings, neighbours, probes", "head")],
        [("training", "task contract, the loop, checkpoints, run folder", "pool")],
        [("recipes", "the papers' training procedures as typed values", "norm")],
        [("data", "sources, decoding, transforms, mixing, the loader", "mixing")],
        [("weights", "load, save, layouts, resizing, deltas, the hub", "scale")],
        [("models", "families, configs, roles, fused copies, models of timm", "ffn")],
        [("layers", "residual, attention, mixing, stems, FFN, norms, scales", "stem")],
        [("kernels", "C++ operators for the CPU", "stem")],
        [("shared", "devices, errors, console, temporary files, plots, pages", "norm")],
    ]
    height, left, width = 46, 24, 560
    canvas = Canvas(
        780,
        48 + height * len(rows),
        "The packages of patchloom from cli down to kernels; a package imports only those below it",
    )
    for i, row in enumerate(rows):
        share = (width - 12 * (len(row) - 1)) / len(row)
        for j, (name, contents, colour) in enumerate(row):
            x, y = left + j * (share + 12), 24 + height * i
            canvas.rect(x, y, share, height - 8, *COLOURS[colour])
            canvas.text(x + 14, y + 24, name, 15, anchor="start")
            canvas.text(x + (100 if len(row) > 1 else 136), y + 24, contents, 12.5, SOFT, anchor="start")
    canvas.line((622, 34), (622, 24 + height * len(rows) - 20))
    canvas.text(636, 340, "imports point", 14, anchor="start")
    canvas.text(636, 359, "downwards only", 14, anchor="start")
    return canvas


def header() -> Canvas:
    """A photo cut into patches; its tokens pass through residual blocks and are combined at the end."""
    canvas = Canvas(
        860, 236, "patchloom: patches become tokens, residual blocks process them, an aggregation combines them"
    )
    _photo(canvas, 28, 54)
    for i, colour in enumerate(PALETTE):
        y, row = THREADS[i], 68 + 46 * (i // 3)
        start = f"M148 {row + 4 * (i % 3)} C180 {row} 176 {y} 214 {y}"
        _thread(canvas, f"{start} L612 {y} C660 {y} 650 114 692 114", colour)
    for b in range(6):
        _bar(canvas, b)
    canvas.parts.append(f'<circle cx="697" cy="114" r="11" fill="{COLOURS["pool"][1]}"/>')
    for i, length in enumerate((26, 92, 44, 18, 34)):
        canvas.rect(736, 66 + 20 * i, length, 12, *COLOURS["head"])
    canvas.line((710, 114), (730, 114))
    canvas.text(88, 218, "patches")
    canvas.text(411, 218, "x + scale · branch(norm(x)), repeated")
    canvas.text(697, 218, "aggregate")
    canvas.text(790, 218, "classify")
    return canvas


def _bar(canvas: Canvas, index: int) -> None:
    """A mixing or an FFN layer; every second thread runs over it, the others under it."""
    words, colour = ("FFN", "ffn") if index % 2 else ("mix", "mixing")
    x = 246 + 60 * index
    canvas.rect(x, 38, 30, 152, *COLOURS[colour])
    for i in range(index % 2, len(PALETTE), 2):
        _thread(canvas, f"M{x - 2} {THREADS[i]} H{x + 32}", PALETTE[i])
    canvas.text(x + 15, 30, words, 12, SOFT)


def _photo(canvas: Canvas, x: float, y: float) -> None:
    for i in range(9):
        canvas.rect(x + 42 * (i % 3), y + 42 * (i // 3), 36, 36, PALETTE[i], PALETTE[i])


def _thread(canvas: Canvas, path: str, colour: str) -> None:
    canvas.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="4" stroke-linecap="round"/>')


DRAWINGS: dict[str, Callable[[], Canvas]] = {
    "header": header,
    "package": package,
    "residual": one_residual,
    "deit": deit,
    "deit3": deit3,
    "parallel": parallel,
    "hmlp": hmlp,
    "cait": cait,
    "resmlp": resmlp,
    "patchconvnet": patchconvnet,
}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
