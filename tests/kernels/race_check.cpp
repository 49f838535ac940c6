// Runs every kernel with one OS thread per CUDA thread, for the thread sanitizer. Prints the tokens that were chosen.
#define SHIM_THREADS
#include "shim.h"

#include "../../engines/accept.cu"

#include <random>

static const int ROWS = 4, THREADS = 64, CHUNKS = 3;

static void run(int columns, Request request, float spread, std::mt19937& random) {
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> logits(ROWS * columns), values(ROWS * columns), draft_probs((ROWS - 1) * columns), top(ROWS * 2);
    for (float& each : logits) each = normal(random) * spread;
    for (float& each : draft_probs) each = 1.0f / columns;
    std::vector<int> tokens(ROWS), parents = {-1, 0, 1, 0}, best_tokens(ROWS * 2), verdict(1 + ROWS);
    if (request.rejection) parents = {-1, 0, 1, 2};
    for (int& each : tokens) each = random() % columns;
    std::vector<Edit> edits = {{0, 1.0f, 2.0f, 1}, {columns / 2, -1.0f, 0.0f, 0}};
    std::vector<u32> masks(ROWS * ((columns + 31) / 32), 0xfffffff7u);
    std::vector<Summary> summaries(ROWS);
    std::vector<u64> masses(ROWS);
    auto launch = [](int x, int y, const std::function<void()>& kernel) {
        shim::launch(shim::Dim3{(unsigned)x, (unsigned)y, 1}, THREADS, kernel);
    };
    launch(CHUNKS, ROWS, [&] {
        process_float32(logits.data(), columns, values.data(), &request, tokens.data(), parents.data(), edits.data(),
                        masks.data(), (columns + 31) / 32, nullptr, ROWS, columns);
    });
    launch(ROWS, 1, [&] { summarize(values.data(), summaries.data(), &request, ROWS, columns, 1); });
    if (request.rejection) {
        launch(CHUNKS, ROWS, [&] {
            probabilities(values.data(), summaries.data(), &request, nullptr, ROWS, columns, columns, logits.data());
        });
        launch(1, 1, [&] {
            reject(values.data(), summaries.data(), &request, tokens.data(), draft_probs.data(), ROWS, columns,
                   verdict.data());
        });
    }
    launch(CHUNKS, ROWS, [&] {
        add_noise(values.data(), summaries.data(), &request, parents.data(), nullptr, ROWS, columns, 0);
    });
    launch(ROWS, 1, [&] {
        best(values.data(), summaries.data(), &request, nullptr, ROWS, columns, 2, best_tokens.data(), top.data(),
             masses.data());
    });
    std::vector<int> choices = {best_tokens[0], best_tokens[2], best_tokens[4], best_tokens[6]};
    if (!request.rejection)
        shim::launch(shim::Dim3{1, 1, 1}, 32, [&] {
            walk(choices.data(), &request, tokens.data(), parents.data(), ROWS, verdict.data());
        });
    printf("%d columns: %d accepted, then token %d\n", columns, verdict[0], verdict[1]);
}

int main() {
    std::mt19937 random(1);
    for (int columns : {777, 2300}) {
        Request request = {};
        request.seed = 7;
        request.top_p = 0.9;
        request.top_k = 100;
        request.inverse_temperature = 1.25f;
        request.min_p_distance = -4.0f;
        request.repetition_penalty = 1.1f;
        request.masked = 1;
        request.rows = ROWS;
        request.edits = 2;
        run(columns, request, 3.0f, random);
        request.rejection = 1;
        run(columns, request, 0.1f, random);
    }
}
