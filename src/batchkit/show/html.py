"""The page: one file that needs no network, for one run or several at the same scale."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from .model import STATES, View, figure_rows
from .svg import STYLE, Scale, chart, defs, height_of, legend, swatch

__all__ = ["page"]

_STYLE = """
*{box-sizing:border-box}
body{margin:0;padding:28px 32px;background:var(--bg);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,'Segoe UI',sans-serif}
h1{font-size:21px;margin:0 0 4px}h2{font-size:17px;margin:0}p{margin:2px 0;color:var(--soft);font-size:13px}
.bar{display:flex;flex-wrap:wrap;gap:6px 20px;align-items:center;margin:14px 0 20px;font-size:13px}
.bar span{display:flex;align-items:center;gap:7px}
button{font:inherit;color:inherit;background:var(--free);border:1px solid var(--line);
border-radius:6px;padding:2px 11px;cursor:pointer}
button:focus-visible,.scroll:focus-visible{outline:2px solid var(--decode);outline-offset:2px}
main{display:flex;flex-wrap:wrap;gap:30px 36px;align-items:flex-start}
section{max-width:100%}.scroll{overflow-x:auto;margin-top:10px}
svg{display:block}
dl{display:flex;flex-wrap:wrap;gap:8px 22px;margin:12px 0 0;max-width:1150px}
dl div{min-width:74px}dt{color:var(--soft);font-size:12px}
dd{margin:0;font-size:16px;font-weight:600;font-variant-numeric:tabular-nums}
.warn{color:var(--preempted);font-weight:600}
#tip{position:fixed;pointer-events:none;visibility:hidden;background:var(--ink);color:var(--bg);
padding:7px 10px;border-radius:7px;
font-size:12.5px;white-space:pre-line;max-width:340px;z-index:2}
.cursor{stroke:var(--ink);stroke-dasharray:2 3;visibility:hidden}
@media print{.zoom{display:none}body{padding:0}}
"""

# The drawing is there without the script; it adds tooltips and the zoom.
_SCRIPT = """
const data=JSON.parse(document.getElementById('data').textContent),tip=document.getElementById('tip');
let zoom=1;
const drawn=[...document.querySelectorAll('svg.run')].map((svg,i)=>
  ({svg,run:data.runs[i],cursor:svg.querySelector('.cursor')}));
function find(spans,step){let a=0,b=spans.length-1;while(a<=b){const m=(a+b)>>1,s=spans[m];
  if(step<s[1])b=m-1;else if(step>s[2])a=m+1;else return s}return null}
function hide(){tip.style.visibility='hidden';for(const d of drawn)d.cursor.style.visibility='hidden'}
for(const d of drawn){d.svg.addEventListener('pointermove',e=>{
  const box=d.svg.getBoundingClientRect(),w=data.step*zoom,at=Math.floor((e.clientX-box.left-data.margin)/w);
  if(at<0||at>=d.run.steps.length)return hide();
  const s=d.run.steps[at],row=Math.floor((e.clientY-box.top)/data.row),lane=d.run.lanes[row],lines=[];
  if(lane){const span=find(lane[1],s[0]);lines.push('request '+lane[0]+' \\u00b7 '+lane[2]);
    if(span)lines.push(data.states[span[0]]+' \\u00b7 tokens '+span[3]+' \\u00b7 blocks '+span[4]+
      ' \\u00b7 steps '+span[1]+'\\u2013'+span[2]);else lines.push('not there in this step');lines.push('')}
  lines.push('step '+s[0]+' at '+s[1]+' s, took '+s[2]+' s');
  lines.push('rows '+s[6]+(s[7]?' ('+s[7]+' idle)':'')+' \\u00b7 tokens '+s[8]+' \\u00b7 waiting '+s[9]);
  lines.push('KV slots: used '+s[3]+', wasted '+s[4]+', free '+s[5]);
  tip.textContent=lines.join('\\n');tip.style.visibility='visible';
  tip.style.left=Math.max(4,Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8))+'px';
  tip.style.top=Math.max(4,Math.min(e.clientY+16,innerHeight-tip.offsetHeight-8))+'px';
  const x=data.margin+(at+.5)*w;d.cursor.setAttribute('x1',x);d.cursor.setAttribute('x2',x);
  d.cursor.style.visibility='visible'});
  d.svg.addEventListener('pointerleave',hide)}
function setZoom(z){zoom=Math.max(.25,Math.min(64,z));
  for(const d of drawn){d.svg.setAttribute('width',data.margin+d.run.steps.length*data.step*zoom+16);
    d.svg.querySelector('.stretch').setAttribute('transform','scale('+zoom+' 1)');
    let last=-1e9;for(const t of d.svg.querySelectorAll('.tick')){const x=data.margin+(+t.dataset.at+.5)*data.step*zoom;
      t.setAttribute('x',x);const ok=x-last>=38;t.style.display=ok?'':'none';if(ok)last=x}}
  for(const [id,turn] of [['held',45],['wasted',-45]])
    document.getElementById(id).setAttribute('patternTransform','scale('+1/zoom+' 1) rotate('+turn+')')}
document.getElementById('in').onclick=()=>setZoom(zoom*2);
document.getElementById('out').onclick=()=>setZoom(zoom/2);
document.getElementById('fit').onclick=()=>setZoom(1);
"""


def page(views: Sequence[View]) -> str:
    """The page of these runs.

    Args:
        views: at least one, each with steps.

    Raises:
        ValueError: there are none, or one has no steps.
    """
    if not views:
        raise ValueError("a page needs at least one run")
    for view in views:
        if not view.steps:
            raise ValueError(f"{view.name} has no steps to draw")
    scale = Scale.for_views(views)
    names = ", ".join(view.name for view in views)
    key = "".join(
        f'<span><svg width="18" height="14" aria-hidden="true">{swatch(kind)}</svg>{escape(meaning)}</span>'
        for kind, meaning in legend(views)
    )
    data = {
        "step": scale.step,
        "row": scale.row,
        "margin": scale.margin,
        "states": STATES,
        "runs": [_data(view) for view in views],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # an id may hold a tag
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>batchkit: {escape(names)}</title><style>{STYLE}{_STYLE}</style></head>\n<body>"
        f'<svg width="0" height="0" style="position:absolute" aria-hidden="true">{defs()}</svg>'
        "<h1>Requests by steps</h1><p>A row is a request, a column a step; under them what the KV blocks hold.</p>"
        f'<div class="bar">{key}<span class="zoom"><button id="out" aria-label="narrower steps">\u2212</button>'
        '<button id="fit">fit</button><button id="in" aria-label="wider steps">+</button></span></div>\n'
        f"<main>{''.join(_section(view, scale) for view in views)}</main>\n"
        f'<div id="tip" role="tooltip"></div><script type="application/json" id="data">{text}</script>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _section(view: View, scale: Scale) -> str:
    stats, figures = view.stats, view.figures
    width = scale.margin + len(view.steps) * scale.step + 16
    height = height_of(view, scale)
    label = (
        f"{view.name}: {stats['scheduler']}, {len(view.lanes)} requests in {figures.steps} steps, "
        f"mean batch {figures.mean_batch:.2f}, {figures.preemptions} preemptions, KV used {figures.used:.0%}, "
        f"wasted {figures.wasted:.0%}"
    )
    died = "" if view.complete else '<p class="warn">The trace has no end: the program died, or goes on.</p>'
    numbers = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figure_rows(figures)
    )
    return (
        f"<section><h2>{escape(str(stats['scheduler']))}</h2>"
        f"<p>{escape(view.name)} \u00b7 {len(view.lanes):,} requests \u00b7 {stats['num_blocks']:,} blocks of "
        f"{stats['block_size']} tokens \u00b7 {stats['max_num_seqs']:,} seats \u00b7 "
        f"{stats['max_tokens_per_step']:,} tokens per step</p>{died}"
        f'<div class="scroll" tabindex="0"><svg class="run" width="{width:g}" height="{height:g}" role="img">'
        f"<title>{escape(label)}</title>{chart(view, scale)}"
        f'<line class="cursor" y1="0" y2="{height:g}"/></svg></div><dl>{numbers}</dl></section>\n'
    )


def _data(view: View) -> dict[str, object]:
    """What the tooltips say, as lists: names of fields would be most of the page."""
    start = view.steps[0].time
    return {
        "steps": [
            [
                step.step, round(step.time - start, 6), round(step.seconds, 6), step.used, step.wasted, step.free,
                step.rows, step.idle, step.tokens, step.waiting,
            ]
            for step in view.steps
        ],
        "lanes": [
            [
                lane.request_id,
                [[STATES.index(span.state), span.first, span.last, span.tokens, span.blocks] for span in lane.spans],
                f"prompt {lane.added['prompt_tokens']}, at most {lane.added['max_tokens']} more"
                + (f", {lane.ended.finish_reason} after {lane.ended.output_tokens}" if lane.ended else ""),
            ]
            for lane in view.lanes
        ],
    }  # fmt: skip
