"""What a quantized target lost, as a page with a table and a plot."""

import math

import jinja2

from specrun.calibration.plan import MAX_ERROR, Plan
from specrun.engines.manifest import Acceptance, Quality

LEFT, TOP, WIDTH, HEIGHT = 50, 10, 900, 220
DECADES = (-5, 0)  # powers of ten on the plot's axis

PAGE = jinja2.Template(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ name }}: quantization</title>
<style>
body { font: 15px/1.5 sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse } td, th { padding: .15em .8em; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left; font-family: monospace }
.in { fill: #2a78b0 } .out { fill: #d9822b } text { font-size: 11px; fill: #555 }
</style></head><body>
<h1>{{ name }}, {{ precision }}</h1>
<table>
<tr><th>held-out tokens</th><th>same choices</th><th>perplexity before</th><th>after</th><th>change</th></tr>
<tr><td>{{ "{:,}".format(quality.tokens) }}</td><td>{{ "%.1f" % (100 * quality.agreement) }} %</td>
<td>{{ "%.2f" % quality.reference_perplexity }}</td><td>{{ "%.2f" % quality.perplexity }}</td>
<td>{{ "%+.2f" % (100 * quality.perplexity_change) }} %</td></tr>
</table>
{% if acceptance %}
<h2>Drafts</h2>
<p>Tokens per round, estimated from how often the first guess is the target's choice.</p>
<table><tr><th>draft</th><th>before</th><th>after</th><th>change</th></tr>
{% for name, each in acceptance.items() %}<tr><td>{{ name }}</td><td>{{ "%.2f" % each.reference }}</td>
<td>{{ "%.2f" % each.quantized }}</td><td>{{ "%+.1f" % (100 * each.change) }} %</td></tr>{% endfor %}
</table>
{% endif %}
{% if bars %}
<h2>Activations</h2>
<p>Error of the products that read each activation, relative to their size, mean over rows; in the graph's order.
<b style="color:#2a78b0">Blue</b>: computed in 8 bits. <b style="color:#d9822b">Orange</b>: above the limit of
{{ limit }}, only the weights are quantized.</p>
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="error of each activation">
{% for decade in decades %}
<line x1="{{ left }}" x2="{{ width }}" y1="{{ decade.y }}" y2="{{ decade.y }}" stroke="#ddd"/>
<text x="4" y="{{ decade.y + 4 }}">{{ decade.label }}</text>{% endfor %}
{% for bar in bars %}<rect class="{{ bar.kind }}" x="{{ bar.x }}" y="{{ bar.y }}" width="{{ bar.width }}"
height="{{ bar.height }}"><title>{{ bar.name }}: {{ bar.error }}</title></rect>{% endfor %}
<line x1="{{ left }}" x2="{{ width }}" y1="{{ limit_y }}" y2="{{ limit_y }}" stroke="#222" stroke-dasharray="4 3"/>
</svg>
<table><tr><th>read by</th><th>error</th><th>smoothing</th><th>scale</th><th>products</th></tr>
{% for bar in bars %}<tr><td>{{ bar.name }}</td><td>{{ bar.error }}</td><td>{{ bar.strength }}</td>
<td>{{ bar.scale }}</td><td>{{ bar.products }}</td></tr>{% endfor %}
</table>
{% endif %}
</body></html>
""",
    autoescape=True,
)


def render_report(
    name: str, precision: str, quality: Quality, acceptance: dict[str, Acceptance], plan: Plan | None
) -> str:
    """The page as HTML; `acceptance`: by draft; `plan`: None where only weights are quantized."""
    step = WIDTH / max(1, len(plan or ()))
    bars = [
        {
            "name": ", ".join(each.layers),
            "kind": "in" if each.quantized else "out",
            "x": round(LEFT + index * step, 1),
            "y": _y(each.error),
            "width": round(0.8 * step, 1),
            "height": round(TOP + HEIGHT - _y(each.error), 1),
            "error": f"{each.error:.1e}",
            "strength": f"{each.strength:g}" if each.strength else "-",
            "scale": f"{each.scale:.2e}" if each.quantized else "-",
            "products": "8 bits" if each.quantized else "8-bit weights",
        }
        for index, each in enumerate((plan or {}).values())
    ]
    decades = [{"y": _y(10.0**power), "label": f"1e{power}"} for power in range(DECADES[0], DECADES[1] + 1)]
    page: str = PAGE.render(
        name=name,
        precision=precision,
        quality=quality,
        acceptance=acceptance,
        bars=bars,
        decades=decades,
        limit=f"{MAX_ERROR:g}",
        limit_y=_y(MAX_ERROR),
        left=LEFT,
        width=LEFT + WIDTH,
        height=2 * TOP + HEIGHT,
    )
    return page


def _y(error: float) -> float:
    """Logarithmic, cut off at both ends of the axis."""
    low, high = DECADES
    share = (math.log10(max(error, 10.0**low)) - low) / (high - low)
    return round(TOP + HEIGHT * (1 - min(1.0, share)), 1)
