"""From a model to a bundle: export, build, distill. They import the stages before the runner, each when it runs."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import click

from specrun.engines.errors import UnfitError


@click.command()
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@click.option("--precision", default="fp32", show_default=True, help="fp32 or fp16.")
@click.option("--width", type=int, help="Tokens per call; with --capacity: write a fully static file.")
@click.option("--capacity", type=int, help="Tokens that the KV cache holds; with --width.")
def export(model: str, out: Path, precision: str, width: int | None, capacity: int | None) -> None:
    """Write MODEL as one ONNX graph of standard operators, validated against PyTorch.

    MODEL: a Hugging Face folder, a .gguf file, a hub id (org/name) or smollm2-135m.
    """
    with export_packages():
        from specrun.export.checkpoint import Checkpoint
        from specrun.export.graph import export_model
    export_model(Checkpoint.open(model, downloads()), out, precision, width, capacity)
    click.echo(str(out))


@click.command()
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Bundle to write.")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    help="Draft model (a MODEL), Medusa or EAGLE head (a folder), early-exit[:LAYERS] or skip:LAYERS. May be repeated; "
    "by default n-gram lookup and a tree of the first propose. Without: n-gram lookup only.",
)
@click.option("--k", type=int, default=4, show_default=True, help="Positions drafted per round.")
@click.option("--nodes", type=int, default=16, show_default=True, help="Nodes of a proposed tree.")
@click.option(
    "--p-min", type=float, default=0.1, show_default=True, help="What a draft finds less likely is not proposed."
)
@click.option(
    "--backend",
    default="ort",
    show_default=True,
    help="ort (ONNX Runtime on the CPU), ort-cuda, tensorrt or tensorrt-rtx.",
)
@click.option(
    "--precision",
    help="fp32, fp16, int8, int8-weights or int4-weights; by default fp32 for ort, fp16 for the others.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="To calibrate with, and to measure what quantization lost; default: built in.",
)
@click.option("--accept-quality-loss", is_flag=True, help="Build a quantized model however much it lost.")
@click.option("--capacity", type=int, help="Prompt and output tokens together; default: 2048, or what the model has.")
@click.option("--gpu", "gpus", multiple=True, help="Architecture that the bundle will run on (sm89); may be repeated.")
@click.option(
    "--slots", type=int, default=1, show_default=True, help="Requests that one call on a GPU serves, for `serve`."
)
def build(
    model: str,
    out: Path,
    drafts: tuple[str, ...],
    k: int,
    nodes: int,
    p_min: float,
    backend: str,
    precision: str | None,
    text: Path | None,
    accept_quality_loss: bool,
    capacity: int | None,
    gpus: tuple[str, ...],
    slots: int,
) -> None:
    """Build MODEL into a bundle, unless it is there already, made from the same inputs.

    MODEL: as for `specrun export`, or a directory that it left.
    """
    with export_packages():
        from specrun.engines.build import build_bundle
        from specrun.engines.build_options import BuildOptions
    options = BuildOptions(
        model, out, drafts, k, nodes, p_min, backend, precision, text, accept_quality_loss, capacity, gpus, slots
    )
    build_bundle(options, downloads())
    click.echo(str(out))


@click.command()
@click.argument("model")
@click.option("--method", required=True, help="medusa, eagle3 or draft (a small language model).")
@click.option(
    "--data",
    multiple=True,
    default=["self"],
    show_default=True,
    help="self: the model writes prompts itself; or a file of prompts, or a directory of text that prompts are made "
    "from: Python source, documentation, WordNet. May be repeated; one that is given twice counts twice.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory for the checkpoint.")
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="Where answers and training states are kept, so that a run can go on; default: OUT.work.",
)
@click.option("--tokens", type=int, default=1_000_000, show_default=True, help="Tokens that the target shall write.")
@click.option("--draft-vocabulary", type=int, default=8192, show_default=True, help="Tokens that the draft knows.")
@click.option("--start", type=click.Path(path_type=Path), help="Go on from this draft.")
@click.option("--epochs", type=float, default=3.0, show_default=True)
@click.option("--batch", type=int, default=6, show_default=True, help="Conversations per step.")
@click.option("--learning-rate", type=float, default=8e-4, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def distill(
    model: str,
    method: str,
    data: tuple[str, ...],
    out: Path,
    work: Path | None,
    tokens: int,
    draft_vocabulary: int,
    start: Path | None,
    epochs: float,
    batch: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Train a draft for MODEL on its own answers, and write it as its authors publish such drafts.

    MODEL: as for `specrun export`. An interrupted run goes on where it stopped, if called again.
    """
    with export_packages():
        from specrun.distill.distill import DistillOptions
        from specrun.distill.distill import distill as run_distill
        from specrun.distill.training import TrainingOptions
    training = TrainingOptions(epochs, batch, learning_rate, seed)
    work = work or out.with_name(f"{out.name}.work")
    run_distill(DistillOptions(model, method, data, out, work, tokens, draft_vocabulary, start, training), downloads())
    click.echo(str(out))


@contextlib.contextmanager
def export_packages() -> Iterator[None]:
    """Imports inside need the export packages; say so where they are not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UnfitError(
            f"exporting and building need {error.name}, which is not installed: pip install 'specrun[export]'"
        ) from error


def downloads() -> Path:
    """Where built-in models are kept between builds."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "specrun" / "models"
