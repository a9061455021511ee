"""The look of a report: light, dark and print from one set of colors; no font, script or image from elsewhere.

Colors of lines and areas are those of Okabe and Ito ("Color Universal Design", 2008), darker or lighter where contrast
with the background needs it.
"""

from __future__ import annotations

_LIGHT = ("#0072b2", "#d55e00", "#007a5a", "#a8508a", "#2f86c0", "#9a6a00", "#555555", "#7a3fb0")
_DARK = ("#56b4e9", "#ff8a3d", "#2fc79a", "#e59ac6", "#8fd0ff", "#f0c24b", "#bbbbbb", "#c09cf0")
_FILL = ("#56b4e9", "#0072b2", "#e69f00", "#cc79a7", "#c8c8c8", "#009e73", "#d55e00", "#f0e442")
_DASHES = ("none", "7 3", "2 3", "9 3 2 3", "12 3", "4 2 1 2 1 2", "1 2", "6 2 6 5")


def _colours(lines: tuple[str, ...]) -> str:
    return "".join(f"--line{i}:{colour};" for i, colour in enumerate(lines))


_DARK_COLOURS = (
    "--back:#14171a;--card:#1d2125;--ink:#e8eaed;--soft:#b3bac1;--rule:#3a4148;--link:#8ab8ff;--bad:#ff7b72;"
    f"{_colours(_DARK)}"
)

CSS = (
    ":root{color-scheme:light dark;"
    "--back:#f6f7f8;--card:#fff;--ink:#1b1f23;--soft:#50575e;--rule:#d5dadf;--link:#0550ae;"
    f"--bad:#c0000c;{_colours(_LIGHT)}"
    + "".join(f"--fill{i}:{colour};" for i, colour in enumerate(_FILL))
    + "}\n"
    + f"@media (prefers-color-scheme:dark){{:root{{{_DARK_COLOURS}}}}}\n"
    + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main,header,footer,nav ul{max-width:1320px;margin:0 auto;padding:0 16px}
h1{font-size:1.6rem;margin:20px 0 4px;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:32px 0 4px;scroll-margin-top:52px}
p{margin:4px 0 12px;max-width:75ch;overflow-wrap:anywhere}
a{color:var(--link)}
a:focus-visible,summary:focus-visible,[tabindex]:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-9999px}.skip:focus{left:8px;top:8px;background:var(--card);padding:8px;z-index:2}
nav{position:sticky;top:0;background:var(--back);border-bottom:1px solid var(--rule);z-index:1}
nav ul{display:flex;gap:4px 16px;overflow-x:auto;list-style:none;padding-top:8px;
padding-bottom:8px;white-space:nowrap}
.grid-of-figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:16px;align-items:start}
figure,.card{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px;margin:0;min-width:0}
figure.wide,.grid-of-figures>.scroll,.grid-of-figures>details{grid-column:1/-1}
.grid-of-figures>.card{grid-column:auto}
@media (min-width:780px){.grid-of-figures>.card{grid-column:span 2}}
figcaption{font-weight:600;margin-bottom:6px;overflow-wrap:anywhere}
figure>svg{display:block;width:100%;height:auto}
figure img{display:block;max-width:100%;height:auto;background:#fff}
svg text{fill:var(--ink);font:11.5px system-ui,-apple-system,"Segoe UI",sans-serif}

svg .inside{fill:#000;paint-order:stroke;stroke:#fff;stroke-width:4px;stroke-linejoin:round}
svg .tick{fill:var(--soft)}svg .unit{fill:var(--soft)}svg .label{fill:var(--soft)}
.grid{stroke:var(--rule);fill:none}.axis{stroke:var(--soft);fill:none}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.band{stroke:none;fill-opacity:.28}.area{stroke:var(--card);stroke-width:.8}
.restart{stroke:var(--soft);stroke-width:1.4;stroke-dasharray:3 3;fill:none}
.bad{stroke:var(--bad);stroke-width:2;fill:none}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:6px 0 0;padding:0;font-size:13px}
.legend li{overflow-wrap:anywhere;min-width:0}
.key{width:26px;height:14px;vertical-align:-2px;margin-right:5px}
.note{font-size:13px;color:var(--soft);margin:6px 0 0}
.missing{border-left:4px solid var(--soft);padding:4px 12px;margin:8px 0;background:var(--card)}
.problem{border-left-color:var(--bad)}
details{margin-top:6px;font-size:13px}summary{cursor:pointer}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:4px 0}
th,td{padding:3px 12px 3px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
.number,figure td{text-align:right;white-space:nowrap}
.events td{overflow-wrap:anywhere}
pre{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px;
overflow-x:auto;max-height:60vh;font-size:12.5px}
.hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
footer{color:var(--soft);font-size:13px;margin-top:40px;padding-bottom:24px}
"""
    + "".join(
        f".line{i}{{stroke:var(--line{i});stroke-dasharray:{dash}}}.band.line{i},.dot.line{i}{{fill:var(--line{i});stroke:none}}"
        f".fill{i}{{fill:var(--fill{i})}}\n"
        for i, dash in enumerate(_DASHES)
    )
    + f"""
@media print{{
:root{{--back:#fff;--card:#fff;--ink:#000;--soft:#333;--rule:#bbb;--link:#000;--bad:#b00;{_colours(_LIGHT)}}}
*{{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
nav,.skip,summary{{display:none}}
.grid-of-figures{{grid-template-columns:1fr 1fr}}
figure,tr,.card{{break-inside:avoid}}h2{{break-after:avoid}}pre{{max-height:none;white-space:pre-wrap}}
}}
"""
)
