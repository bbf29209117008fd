"""The style sheet of a report, for light, dark, narrow and printed pages."""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c1e21;--dim:#5b6168;--line:#d9dde2;--card:#f6f7f9;--accent:#0b63a5;
--good:#0b6e4f;--bad:#b3401a;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#aa4499;--c4:#8a6d00;--c5:#332288;
--c6:#117733;
--c7:#7a4b2a}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e8eaed;--dim:#a0a7af;--line:#353b42;--card:#1d2125;
--accent:#6cb6f0;--good:#52c79a;--bad:#f08a5d;--c0:#56b4e9;--c1:#f0894a;--c2:#3fc79a;--c3:#d68ac6;--c4:#d9c04f;
--c5:#a59be8;--c6:#6fbf73;--c7:#c99a75}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
main,header,footer{max-width:1120px;margin:0 auto;padding:0 16px}
h1{font-size:1.6rem;margin:1rem 0 .2rem;overflow-wrap:anywhere}h2{font-size:1.25rem;margin:2.4rem 0 .6rem;
border-bottom:1px solid var(--line);padding-bottom:.2rem}h3{font-size:1.02rem;margin:1.4rem 0 .4rem}
header p{margin:.3rem 0}p,li{max-width:75ch}.dim,figcaption{color:var(--dim)}a{color:var(--accent)}
nav{position:sticky;top:0;background:var(--bg);border-bottom:1px solid var(--line);z-index:1}
nav div{max-width:1120px;margin:0 auto;padding:6px 16px;display:flex;flex-wrap:wrap;gap:2px 14px;white-space:nowrap;
font-size:.92rem}
section{scroll-margin-top:4.5rem}
@media(max-width:700px){nav{position:static}section{scroll-margin-top:1rem}}
.figures{display:grid;gap:10px;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));margin:1rem 0}
.figures div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.figures b{display:block;font-size:1.5rem}.figures span{color:var(--dim);font-size:.86rem;display:block}
.charts{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr))}
.graphs{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,250px),1fr))}
.pictures{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(min(100%,230px),1fr))}
figure{margin:0;min-width:0}.charts figure{max-width:560px}.picture img{width:100%;height:auto;display:block;
border-radius:4px}
figcaption{font-size:.86rem;overflow-wrap:anywhere}
.charts svg{max-width:100%}svg{height:auto;display:block}svg text{fill:var(--dim)}
/* The shadows at the ends, which scroll out of view at the first and at the last column, show that there is more. */
.scroll{overflow-x:auto;max-width:100%;background:linear-gradient(90deg,var(--bg) 50%,transparent),
linear-gradient(270deg,var(--bg) 50%,transparent) 100% 0,linear-gradient(90deg,#8888,transparent),
linear-gradient(270deg,#8888,transparent) 100% 0;background-attachment:local,local,scroll,scroll;
background-repeat:no-repeat;background-size:48px 100%,48px 100%,16px 100%,16px 100%}
.scroll,.charts,.graphs,.pictures{margin:.7rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:3px 9px;border-bottom:1px solid var(--line);text-align:right;vertical-align:top}
th:first-child,td:first-child,.text{text-align:left}thead th{color:var(--dim);font-weight:600}
td.text:last-child{min-width:9em}
.advice{border-left:4px solid var(--accent);background:var(--card);padding:8px 12px;margin:8px 0;
border-radius:0 6px 6px 0}
.advice p{margin:.15rem 0}.advice pre{white-space:pre-wrap;overflow-wrap:anywhere}
code{white-space:nowrap}.good{color:var(--good)}.bad{color:var(--bad)}
pre{background:var(--card);border:1px solid var(--line);padding:10px;overflow-x:auto;font-size:.8rem}
summary{cursor:pointer}.sw{display:inline-block;width:.8em;height:.8em;border:1px solid #000;vertical-align:middle}
@media print{:root{--bg:#fff;--fg:#000;--dim:#444;--line:#bbb;--card:#fff;--accent:#00457a;--c0:#0072b2;--c1:#d55e00;
--c2:#009e73;--c3:#aa4499;--c4:#8a6d00;--c5:#332288;--c6:#117733;--c7:#7a4b2a}nav{display:none}
figure,.advice,tr{break-inside:avoid}h2,h3{break-after:avoid}body{font-size:12px;print-color-adjust:exact;
-webkit-print-color-adjust:exact}.scroll{overflow:visible;background:none}}
"""
