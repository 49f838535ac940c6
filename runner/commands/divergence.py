"""Why plain and speculative output differ, in words."""

from specrun.runner.compare import Divergence


def describe_divergence(divergence: Divergence) -> str:
    reason = "rounding" if divergence.within_rounding else "NOT rounding: this is a defect, please report it"
    return (
        f"first difference at output token {divergence.index}: plain {divergence.plain_token}, speculative "
        f"{divergence.speculative_token}; lead of the plain choice {divergence.gap:.2e}, logits of the two runs "
        f"differ by at most {divergence.logit_difference:.2e}: {reason}"
    )
