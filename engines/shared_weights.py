"""Let a compiled graph use the weights file of another one in the same directory."""

import hashlib
from pathlib import Path

import onnx_ir as ir


def share_weights(graph: Path, owner: Path) -> int:
    """Point the external tensors of `graph` to equal ones of `owner`; those that `owner` lacks stay in a file of its
    own. Both are in the same directory. Returns how many bytes `graph` keeps for itself.
    """
    theirs = {_digest(tensor): tensor for tensor in _external(ir.load(owner)).values()}
    model = ir.load(graph)
    own = graph.with_name(graph.name + ".data")
    kept = bytearray()
    for name, tensor in _external(model).items():
        shared = theirs.get(_digest(tensor))
        if shared is None:
            location, offset = own.name, len(kept)
            kept += tensor.tobytes()
        else:
            location, offset = str(shared.location), shared.offset or 0
        model.graph.initializers[name].const_value = ir.ExternalTensor(
            location,
            offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=name,
            base_dir=graph.parent,
        )
    partial = own.with_suffix(".partial")
    partial.write_bytes(kept)
    ir.save(model, graph)
    partial.replace(own)
    if not kept:
        own.unlink()
    return len(kept)


def _external(model: ir.Model) -> dict[str, ir.ExternalTensor]:
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, ir.ExternalTensor)}


def _digest(tensor: ir.ExternalTensor) -> tuple[str, str, bytes]:
    return str(tensor.dtype), str(tensor.shape), hashlib.sha256(tensor.tobytes()).digest()
