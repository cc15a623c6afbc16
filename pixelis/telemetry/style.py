"""The style of a report: readable on a phone and on a desktop, light and dark by the reader's setting."""

STYLE = """
:root{--bg:#fbfbf9;--card:#fff;--ink:#1c1e21;--soft:#5c6370;--line:#dfe1e5;--good:#177245;--bad:#b3261e;--c0:#1f5fd0;
  --c1:#c2560c;--c2:#177245;--c3:#8338b8;--c4:#a8780a;--c5:#a02c63;--b0:#ff2d7a;--b1:#00b3ff;--b2:#ffb700;--b3:#39d353}
@media(prefers-color-scheme:dark){
  :root{--bg:#14161a;--card:#1c1f25;--ink:#e8eaed;--soft:#a2a9b5;--line:#343943;--good:#5fd39a;--bad:#ff8a80;
    --c0:#7fb0ff;--c1:#ffa05c;--c2:#6fdb9f;--c3:#cf9bf5;--c4:#e8c35a;--c5:#f590bd}
}
*{box-sizing:border-box}
html{scroll-behavior:smooth}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
  "Helvetica Neue",sans-serif}
main{max-width:1040px;margin:0 auto;padding:24px 20px 64px}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .5rem;overflow-wrap:anywhere}
h2{font-size:1.35rem;margin:3rem 0 .75rem}
h3{font-size:1.05rem;margin:1.5rem 0 .5rem}
h4{font-size:.95rem;margin:0 0 .35rem}
p{margin:.4rem 0}
small,.caption,figcaption,.terms,dt{color:var(--soft);font-size:.875rem}
.brand{color:var(--soft);margin:0}
.lead{max-width:46em;font-size:1.06rem}
bdi{overflow-wrap:anywhere}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:.6rem .9rem .6rem 0;border-bottom:1px solid var(--line)}
thead th{font-size:.85rem;color:var(--soft);font-weight:600}
tbody th small{display:block;font-weight:400;max-width:17rem}
.bar{position:relative;height:14px;margin:.3rem 0 .1rem;min-width:11rem;background:var(--line);border-radius:3px}
.bar span{position:absolute;inset:0 auto 0 0;background:var(--c0);border-radius:3px}
.bar i{position:absolute;top:6px;height:2px;background:var(--ink);min-width:2px}
.bar i::before,.bar i::after{content:"";position:absolute;top:-4px;height:10px;width:2px;background:var(--ink)}
.bar i::after{right:0}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr));gap:20px}
figure{margin:0}
.grid>figure{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px;min-width:0}
.chart{width:100%;max-width:560px;height:auto;display:block}
.chart text{font-size:12px;fill:var(--soft)}
.chart .grid{stroke:var(--line)}
.chart polyline{fill:none;stroke-width:2;stroke-linejoin:round}
.chart .c0{stroke:var(--c0)}
.chart .c1{stroke:var(--c1)}
.chart .c2{stroke:var(--c2)}
.chart .c3{stroke:var(--c3)}
.chart .c4{stroke:var(--c4)}
.chart .c5{stroke:var(--c5)}
.chart circle{stroke:none}
.chart circle.c0,.legend .c0{fill:var(--c0);background:var(--c0)}
.chart circle.c1,.legend .c1{fill:var(--c1);background:var(--c1)}
.chart circle.c2,.legend .c2{fill:var(--c2);background:var(--c2)}
.chart circle.c3,.legend .c3{fill:var(--c3);background:var(--c3)}
.chart circle.c4,.legend .c4{fill:var(--c4);background:var(--c4)}
.chart circle.c5,.legend .c5{fill:var(--c5);background:var(--c5)}
.legend,.terms{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.4rem 0;padding:0}
.legend li,.legend b,.terms b{color:var(--ink)}
.legend b{white-space:nowrap}
.legend i{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:.4rem;vertical-align:middle}
details{margin:.8rem 0}
summary{cursor:pointer;color:var(--soft)}
details .grid{margin-top:12px}
pre{margin:.35rem 0 0;padding:.55rem .7rem;background:var(--bg);border:1px solid var(--line);border-radius:6px;
  white-space:pre-wrap;overflow-wrap:anywhere;font:.83rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,
  "DejaVu Sans Mono",monospace;max-height:26rem;overflow:auto}
.links{display:flex;flex-wrap:wrap;gap:6px;margin:.8rem 0}
.pill{border:1px solid currentColor;border-radius:99px;padding:.05rem .65rem;font-size:.875rem;color:var(--soft);
  text-decoration:none;white-space:nowrap}
.right{color:var(--good)}
.wrong{color:var(--bad)}
.episode{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px;margin:0 0 22px;
  scroll-margin-top:12px}
.episode>header{display:flex;gap:12px;align-items:center;justify-content:space-between}
.episode h3{margin:0}
.question{font-size:1.12rem;font-weight:600;margin:.5rem 0 .2rem;white-space:pre-wrap}
.episode-body{display:grid;grid-template-columns:minmax(0,5fr) minmax(0,4fr);gap:22px;margin-top:14px}
.scenes{align-self:start;position:sticky;top:12px}
.frame{position:relative;line-height:0;margin-bottom:6px}
.frame img{width:100%;height:auto;border-radius:4px}
.box{position:absolute;border:3px solid var(--b);outline:1.5px solid #000;box-shadow:inset 0 0 0 1.5px #fff}
.box b{position:absolute;left:-3px;bottom:100%}
.box b,.mark{background:var(--b);color:#000;font:700 12px/1.35 system-ui,sans-serif;padding:0 5px;border-radius:3px}
.b0{--b:var(--b0)}
.b1{--b:var(--b1)}
.b2{--b:var(--b2)}
.b3{--b:var(--b3)}
.small{display:flex;gap:12px;align-items:center;margin:.6rem 0}
.small img{width:128px;height:auto;flex:none;border:1px solid var(--line);border-radius:4px}
.pixels{image-rendering:pixelated}
.shots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(46%,150px),1fr));gap:10px;margin:.6rem 0}
.shots figure{min-width:0}
.shots img,.found img{width:100%;height:auto;display:block;border:1px solid var(--line);border-radius:4px}
.shots .frame{margin:0}
.shots figcaption{font-size:.8rem;line-height:1.35;margin-top:3px}
.found{margin:.6rem 0}
.found figcaption{margin-top:3px}
.read{margin:.5rem 0;padding-left:2.2em}
.turns .read li{border:0;padding:0;display:list-item}
.read li::marker{color:var(--soft);font-size:.8rem}
.swatch{display:inline-block;width:.9em;height:.9em;border-radius:3px;border:1px solid var(--line);margin-right:.35em;
  vertical-align:-.1em}
dl.facts{grid-template-columns:repeat(auto-fill,minmax(min(46%,130px),1fr));gap:.35rem 1rem;margin:.2rem 0 .7rem}
.facts dt{font-size:.8rem;line-height:1.3}
.facts dd{font-size:.9rem}
.missing{color:var(--soft);font-style:italic}
.turns{list-style:none;margin:0;padding:0;display:grid;gap:12px;align-content:start}
.turns li{border-left:3px solid var(--line);padding-left:12px;min-width:0}
.turns .policy{border-color:var(--c0)}
.turns .failed{border-color:var(--bad)}
.turns details{margin:.35rem 0 0;font-size:.875rem}
.terms{border-top:1px solid var(--line);padding-top:10px;margin:16px 0 0}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,210px),1fr));gap:.5rem 1.2rem;margin:.4rem 0}
dd{margin:0;overflow-wrap:anywhere}
@media(max-width:640px){
  main{padding:16px 14px 48px}
  h1{font-size:1.5rem}
  h2{margin-top:2.2rem}
  .episode{padding:14px}
  .episode-body{grid-template-columns:minmax(0,1fr)}
  .scenes{position:static}
  table thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
  table tr{display:block;padding:.6rem 0;border-bottom:1px solid var(--line)}
  table th,table td{display:block;border:0;padding:.1rem 0}
  table tbody th small{max-width:none}
  table td::before{content:attr(data-label) " ";color:var(--soft);font-size:.875rem}
}
@media print{
  .episode,figure{break-inside:avoid}
}
"""
