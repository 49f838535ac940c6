"""How long the accept step takes on this machine's GPU: `make gpu`. Microseconds, medians, kernels only."""

import numpy as np

from specrun.runner.cuda.acceptor import CudaAcceptor
from specrun.runner.cuda.row_sampler import Part, RowSampler, Shape
from specrun.runner.sampling import Chooser, Sampling
from specrun.runner.types import Proposal
from tests.kernels.driver import Driver

SAMPLINGS = {
    "temperature 0": Sampling(seed=1),
    "temperature 1": Sampling(1.0, seed=1),
    "temperature 1, top-p 0.9": Sampling(1.0, top_p=0.9, seed=1),
    "temperature 1, top-k 50, top-p 0.9": Sampling(1.0, top_k=50, top_p=0.9, seed=1),
}
REPEATS = 50


def microseconds(driver: Driver, columns: int, requests: int, k: int, sampling: Sampling) -> float:
    """Median time of one accept step on random logits in half precision."""
    from cuda.core import EventOptions

    rng = np.random.default_rng(0)
    logits = driver.upload((rng.standard_normal((requests, k + 1, columns)) * 4).astype(np.float16))
    shape = Shape(requests, k + 1, columns, columns, "float16", columns)
    sampler = RowSampler(driver.kernels, driver.device, driver.stream, shape)
    acceptor = CudaAcceptor(sampler, driver.device, driver.stream)
    sampler.write([Part(Chooser(sampling), 10, Proposal.chain([0] * k))] * requests)
    times = []
    for _ in range(REPEATS):
        start = driver.stream.record(options=EventOptions(timing_enabled=True))
        acceptor.launch(int(logits.handle))
        end = driver.stream.record(options=EventOptions(timing_enabled=True))
        end.sync()
        times.append(1000 * (end - start))
    return float(np.median(times))


def main() -> None:
    driver = Driver.of_gpu()
    print(f"{driver.device.name}, sm{driver.device.arch}, k = 4, float16 logits")
    for columns in (49_152, 151_936):
        for requests in (1, 8):
            for name, sampling in SAMPLINGS.items():
                time = microseconds(driver, columns, requests, 4, sampling)
                print(f"vocabulary {columns:>7}, {requests} requests, {name:<36} {time:8.1f}")


if __name__ == "__main__":
    main()
