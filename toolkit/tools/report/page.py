"""Makes a self-contained HTML page without scripts or network access, and the small parts of its sections."""

from collections.abc import Sequence
from html import escape

from toolkit.tools.report.charts import BarChart as BarChart
from toolkit.tools.report.charts import Chart, svg
from toolkit.tools.report.style import STYLE

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # a browser makes no requests


def page(title: str, subtitles: Sequence[str], sections: Sequence[tuple[str, str, str]]) -> str:
    """Return the text of an HTML page.

    Args:
        subtitles: lines below the title.
        sections: (id, heading, HTML) of each; sections without HTML are left out.
    """
    below = "".join(paragraph(line, "dim") for line in subtitles)
    shown = [(key, heading, html) for key, heading, html in sections if html]
    links = "".join(f'<a href="#{key}">{escape(heading)}</a>' for key, heading, _ in shown)
    body = "\n".join(f'<section id="{key}"><h2>{escape(heading)}</h2>{html}</section>' for key, heading, html in shown)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<link rel=icon href="data:,"><style>{STYLE}</style></head>\n'
        f"<body><header><h1>{escape(title)}</h1>{below}</header>"
        f"<nav><div>{links}</div></nav><main>\n{body}\n</main></body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence], text: Sequence[int] = (0,)) -> str:
    """Return an HTML table; "" without rows. Cells are escaped, unless they are `Html`.

    text: indices of the columns that are aligned left, as text; the others are aligned right, as numbers.
    """
    if not rows:
        return ""

    def cell(tag: str, i: int, value) -> str:
        shown = str(value) if isinstance(value, Html) else escape(str(value))
        return f"<{tag}{' class=text' if i in text else ''}>{shown}</{tag}>"

    lines = ""
    for row in rows:
        cells = "".join(cell("td", i, value) for i, value in enumerate(row))
        lines += f"<tr>{cells}</tr>"
    first = "".join(cell("th", i, name) for i, name in enumerate(head))
    return f"<div class=scroll><table><thead><tr>{first}</tr></thead><tbody>{lines}</tbody></table></div>"


class Html(str):
    """Text that is HTML, and must not be escaped."""


def paragraph(text: str, css: str = "") -> str:
    """Return an HTML paragraph with this text, which is escaped. css: name of its class."""
    return f"<p{f' class={css}' if css else ''}>{escape(text)}</p>"


def charts(of: Sequence[Chart]) -> str:
    """Return the charts as HTML, side by side; "" if all are empty."""
    shown = "".join(map(svg, of))
    return f"<div class=charts>{shown}</div>" if shown else ""


def pictures(parts: Sequence[str]) -> str:
    """Return the HTML of pictures, side by side; "" if all are ""."""
    shown = [part for part in parts if part]
    return f"<div class=pictures>{''.join(shown)}</div>" if shown else ""


def under(heading: str, html: str) -> str:
    """Return `html` below a heading, which is HTML too; "" if `html` is empty."""
    return f"<h3>{heading}</h3>{html}" if html else ""


def folded(summary: str, html: str) -> str:
    """Return `html` folded below a summary, which is escaped; "" if `html` is empty."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>" if html else ""


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` decimals; "–" for None and NaN."""
    return "–" if value is None or value != value else f"{value:.{digits}f}"


def with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    """Format a number, followed by the (low, high) ends of its interval if there is one."""
    return number(value) if interval is None else f"{number(value)} ({number(interval[0])} to {number(interval[1])})"
