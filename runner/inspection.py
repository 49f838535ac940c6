"""`specrun inspect`: what the engines of a bundle are made of."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specrun.engines.layers import SUFFIX, EngineLayers, Layer
from specrun.engines.manifest import Bundle
from specrun.engines.schema import to_json


@dataclass(frozen=True)
class EngineInspection:
    """One engine of a bundle."""

    file: str  # relative to the bundle
    bytes: int  # with the weights that lie beside it
    made_of: EngineLayers
    fell_back: tuple[Layer, ...]  # products and attention in a precision that is not the bundle's

    def counts(self) -> dict[str, dict[str, int]]:
        """How many layers there are, by type and precision; the types that cost most first."""
        types: dict[str, Counter[str]] = {}
        for layer in sorted(self.made_of.layers, key=lambda layer: not layer.computes):
            types.setdefault(layer.type, Counter())[layer.precision] += 1
        return {kind: dict(counter) for kind, counter in types.items()}

    def to_json(self) -> dict[str, Any]:
        return {**to_json(self), "counts": self.counts()}


def inspect_engines(bundle: Bundle) -> Iterator[EngineInspection]:
    """Every engine, target first. Reads what the build wrote down; needs no GPU. Raises SchemaError."""
    manifest = bundle.manifest
    files = [name.removesuffix(SUFFIX) for name in manifest.files if name.endswith(SUFFIX)]
    for file in sorted(files, key=lambda name: (not name.startswith("target/"), name)):
        made_of = EngineLayers.read(bundle.path / file)
        size = sum(entry.bytes for name, entry in manifest.files.items() if name in (file, f"{file}.data"))
        fell_back = tuple(
            layer for layer in made_of.layers if layer.computes and not _is_wanted(layer, manifest.precision)
        )
        yield EngineInspection(file, size, made_of, fell_back)


def _is_wanted(layer: Layer, precision: str) -> bool:
    """Whether a layer computes as the bundle's precision asks for. Attention is not quantized in any."""
    if layer.is_attention:
        return layer.precision in ("fp32", "fp16")
    return layer.precision == precision.replace("-", " ")


def render(found: EngineInspection, bundle: Bundle, all_layers: bool) -> str:
    """For people: a table of layers by precision."""
    manifest, made_of = bundle.manifest, found.made_of
    calls = f"calls of {', '.join(map(str, made_of.widths))} tokens" if made_of.widths else "calls of any width"
    calls += f" for 1 or {made_of.slots} sequences" if made_of.slots > 1 else ""
    cache = f", KV cache of {made_of.rows} rows" if made_of.rows else ""
    lines = [f"{found.file}: {found.bytes / 2**20:.1f} MiB, {manifest.backend}, {manifest.precision}, {calls}{cache}"]
    counts = found.counts()
    precisions = sorted({precision for counter in counts.values() for precision in counter})
    names = [precision or "other" for precision in precisions]
    lines.append(f"  {'layer':<24}" + "".join(f"{name:>14}" for name in names))
    for kind, counter in counts.items():
        lines.append(f"  {kind:<24}" + "".join(f"{counter.get(precision) or '':>14}" for precision in precisions))
    back = Counter(f"{layer.type} in {layer.precision}" for layer in found.fell_back)
    lines.append(f"  fell back: {', '.join(f'{count} {what}' for what, count in back.items()) or 'none'}")
    if all_layers:
        lines += [f"    {layer.name}: {layer.type} {layer.precision}" for layer in made_of.layers]
    else:
        lines += [f"    {layer.name}" for layer in found.fell_back]
    return "\n".join(lines)
