// llama.cpp's own library, measured and asked under the conditions that our engine is measured and asked under.
//
//   llama_bench MODEL [--threads 2] [--context 512] [--batches 1,4,16] [--runs 3] [--unified]
//   llama_bench requantise IN OUT q4_0|q4_1|q8_0|f16|f32
//   llama_bench tokenise MODEL TEXT_FILE
//   llama_bench reference MODEL IDS_FILE N [--threads 1] [--at 600,1000] [--f32]
//
// Built by llama_cpp.py, which says where the program lies. Results go to standard output, everything else to standard error.

#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Decoding steps before the timed ones, and the timed ones of one run.
constexpr int WARM_STEPS = 4;
constexpr int TIMED_STEPS = 32;
// Decoded tokens come on top of the context; llama.cpp rounds a sequence's cells up to this.
constexpr int CELLS_MULTIPLE = 256;
constexpr int BATCH_TOKENS_MAX = 2048;
constexpr int MICROBATCH_TOKENS = 512;
// Steps for which a reference lists the most probable tokens, and how many of them.
constexpr int TOP_STEPS = 8;
constexpr int TOP_TOKENS = 5;

using Model = std::unique_ptr<llama_model, decltype(&llama_model_free)>;
using Context = std::unique_ptr<llama_context, decltype(&llama_free)>;
using Ids = std::vector<llama_token>;

[[noreturn]] void refuse(const std::string & what) { throw std::runtime_error(what); }

// -- arguments

struct Arguments {
    std::vector<std::string> plain;
    std::map<std::string, std::string> options;
};

Arguments read_arguments(int count, char ** values, const std::vector<std::string> & flags) {
    Arguments read;
    for (int at = 1; at < count; at++) {
        const std::string word = values[at];
        if (word.rfind("--", 0) != 0) {
            read.plain.push_back(word);
        } else if (std::find(flags.begin(), flags.end(), word) != flags.end()) {
            read.options[word] = "1";
        } else if (at + 1 < count) {
            read.options[word] = values[++at];
        } else {
            refuse("option " + word + " has no value");
        }
    }
    return read;
}

std::vector<int> numbers(const std::string & name, std::string text) {
    std::replace(text.begin(), text.end(), ',', ' ');
    std::istringstream words(text);
    std::vector<int> found;
    for (std::string word; words >> word;) {
        char * end = nullptr;
        const long value = std::strtol(word.c_str(), &end, 10);
        if (*end != 0 || value < 0 || value > 1'000'000'000) {
            refuse(name + ": `" + word + "` is not a count");
        }
        found.push_back(static_cast<int>(value));
    }
    return found;
}

int number(Arguments & arguments, const std::string & name, int otherwise) {
    const auto at = arguments.options.find(name);
    if (at == arguments.options.end()) {
        return otherwise;
    }
    const auto found = numbers(name, at->second);
    if (found.size() != 1 || found[0] == 0) {
        refuse(name + ": `" + at->second + "` is not one positive number");
    }
    arguments.options.erase(at);
    return found[0];
}

std::vector<int> list(Arguments & arguments, const std::string & name, const std::string & otherwise) {
    const auto at = arguments.options.find(name);
    const auto found = numbers(name, at == arguments.options.end() ? otherwise : at->second);
    arguments.options.erase(name);
    return found;
}

void refuse_the_rest(const Arguments & arguments) {
    if (!arguments.options.empty()) {
        refuse("unknown option " + arguments.options.begin()->first);
    }
}

std::string contents(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        refuse("cannot read " + path);
    }
    return {std::istreambuf_iterator<char>(file), {}};
}

// -- the library

Model load(const std::string & path, bool repack, bool vocabulary_only) {
    auto params = llama_model_default_params();
    params.use_extra_bufts = repack;
    params.vocab_only = vocabulary_only;
    Model model(llama_model_load_from_file(path.c_str(), params), llama_model_free);
    if (!model) {
        refuse("cannot load " + path);
    }
    return model;
}

llama_context_params context_params(int tokens, int sequences, int threads) {
    auto params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(tokens) * sequences;
    params.n_batch = BATCH_TOKENS_MAX;
    params.n_ubatch = MICROBATCH_TOKENS;
    params.n_seq_max = sequences;
    params.n_threads = params.n_threads_batch = threads;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k = params.type_v = GGML_TYPE_F16;
    // As llama.cpp's own programs have it: layers with a window keep the window only.
    params.swa_full = false;
    params.no_perf = true;
    return params;
}

Context open(llama_model * model, const llama_context_params & params) {
    Context context(llama_init_from_model(model, params), llama_free);
    if (!context) {
        refuse("cannot make a context of " + std::to_string(params.n_ctx) + " tokens");
    }
    return context;
}

// Tokens to run in one call; `wanted` says for which of them there are logits.
class Batch {
public:
    Batch() : batch(llama_batch_init(BATCH_TOKENS_MAX, 0, 1)) {}
    ~Batch() { llama_batch_free(batch); }
    Batch(const Batch &) = delete;

    void add(llama_token token, int position, int sequence, bool wanted) {
        const int at = batch.n_tokens++;
        batch.token[at] = token;
        batch.pos[at] = position;
        batch.n_seq_id[at] = 1;
        batch.seq_id[at][0] = sequence;
        batch.logits[at] = wanted;
    }

    bool full() const { return batch.n_tokens == BATCH_TOKENS_MAX; }

    void run(llama_context * context) {
        const int code = llama_decode(context, batch);
        if (code != 0) {
            refuse("llama_decode returned " + std::to_string(code));
        }
        llama_synchronize(context);
        batch.n_tokens = 0;
    }

private:
    llama_batch batch;
};

// -- speed

double seconds_of(const std::function<void()> & work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const size_t half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

void report(const std::string & name, const std::vector<double> & rates) {
    fprintf(stderr, "%s, each run:", name.c_str());
    for (const double rate : rates) {
        fprintf(stderr, " %.1f", rate);
    }
    fprintf(stderr, "\n");
    printf("%s %.1f\n", name.c_str(), median(rates));
    fflush(stdout);
}

double load_average() {
    double load = 0;
    return getloadavg(&load, 1) == 1 ? load : NAN;
}

class Bench {
public:
    Bench(llama_model * model, int context, int threads, bool unified)
        : model(model), length(context), threads(threads), unified(unified),
          vocabulary(llama_vocab_n_tokens(llama_model_get_vocab(model))) {}

    void prefill(int runs) {
        const auto context = open(model, params(1));
        std::vector<double> rates;
        for (int run = -1; run < runs; run++) {
            llama_memory_clear(llama_get_memory(context.get()), true);
            const double took = seconds_of([&] { fill(context.get(), 0, run); });
            if (run >= 0) { // the first warms up
                rates.push_back(length / took);
            }
        }
        report("prefill" + std::to_string(length), rates);
    }

    void decode(int sequences, int runs) {
        const auto context = open(model, params(sequences));
        for (int sequence = 0; sequence < sequences; sequence++) {
            fill(context.get(), sequence, sequence);
        }
        std::vector<double> rates;
        for (int run = 0; run < runs; run++) {
            steps(context.get(), sequences, length, WARM_STEPS);
            const double took = seconds_of([&] { steps(context.get(), sequences, length + WARM_STEPS, TIMED_STEPS); });
            rates.push_back(TIMED_STEPS * sequences / took);
            // Every run begins at the same context.
            for (int sequence = 0; sequence < sequences; sequence++) {
                if (!llama_memory_seq_rm(llama_get_memory(context.get()), sequence, length, -1)) {
                    refuse("cannot go back to the prompt");
                }
            }
        }
        report("decode" + std::to_string(sequences), rates);
    }

private:
    llama_context_params params(int sequences) const {
        const int tokens = length + WARM_STEPS + TIMED_STEPS;
        auto params = context_params((tokens + CELLS_MULTIPLE - 1) / CELLS_MULTIPLE * CELLS_MULTIPLE, sequences, threads);
        params.kv_unified = unified;
        return params;
    }

    // Any token will do: only the time counts. Different sequences get different ones.
    llama_token token(int sequence, int position) const {
        const uint64_t mixed = (uint64_t(sequence + 1) * 1'000'003 + position) * 2'654'435'761u;
        return static_cast<llama_token>((mixed >> 8) % vocabulary);
    }

    void fill(llama_context * context, int sequence, int seed) {
        for (int position = 0; position < length; position++) {
            batch.add(token(seed, position), position, sequence, position + 1 == length);
            if (batch.full() || position + 1 == length) {
                batch.run(context);
            }
        }
    }

    void steps(llama_context * context, int sequences, int position, int count) {
        for (int step = 0; step < count; step++) {
            for (int sequence = 0; sequence < sequences; sequence++) {
                batch.add(token(sequence, position + step), position + step, sequence, true);
            }
            batch.run(context);
        }
    }

    llama_model * model;
    int length, threads;
    bool unified;
    int vocabulary;
    Batch batch;
};

void bench(Arguments arguments) {
    const int threads = number(arguments, "--threads", 2);
    const int context = number(arguments, "--context", 512);
    const int runs = number(arguments, "--runs", 3);
    const auto batches = list(arguments, "--batches", "1,4,16");
    const bool unified = arguments.options.erase("--unified") > 0;
    refuse_the_rest(arguments);
    if (arguments.plain.size() != 1) {
        refuse("unexpected argument " + arguments.plain[1]);
    }
    const auto model = load(arguments.plain[0], true, false);
    fprintf(stderr, "llama.cpp %s, %s\n", llama_version(), llama_print_system_info());
    printf("load_before %.2f\n", load_average());
    Bench bench(model.get(), context, threads, unified);
    bench.prefill(runs);
    for (const int sequences : batches) {
        if (sequences == 0 || sequences > BATCH_TOKENS_MAX) {
            refuse("--batches: `" + std::to_string(sequences) + "` sequences cannot run together");
        }
        bench.decode(sequences, runs);
    }
    printf("load_after %.2f\n", load_average());
}

// -- other number formats

void requantise(Arguments arguments) {
    refuse_the_rest(arguments);
    if (arguments.plain.size() != 4) {
        refuse("usage: llama_bench requantise IN OUT FORMAT");
    }
    const std::map<std::string, llama_ftype> formats = {
        {"q4_0", LLAMA_FTYPE_MOSTLY_Q4_0}, {"q4_1", LLAMA_FTYPE_MOSTLY_Q4_1}, {"q8_0", LLAMA_FTYPE_MOSTLY_Q8_0},
        {"f16", LLAMA_FTYPE_MOSTLY_F16},   {"f32", LLAMA_FTYPE_ALL_F32},
    };
    const auto format = formats.find(arguments.plain[3]);
    if (format == formats.end()) {
        refuse("format `" + arguments.plain[3] + "` is none of q4_0, q4_1, q8_0, f16, f32");
    }
    auto params = llama_model_quantize_default_params();
    params.ftype = format->second;
    params.allow_requantize = true;
    if (llama_model_quantize(arguments.plain[1].c_str(), arguments.plain[2].c_str(), &params) != 0) {
        refuse("cannot requantise " + arguments.plain[1]);
    }
    printf("%s\n", arguments.plain[2].c_str());
}

// -- reference runs

void tokenise(Arguments arguments) {
    refuse_the_rest(arguments);
    if (arguments.plain.size() != 3) {
        refuse("usage: llama_bench tokenise MODEL TEXT_FILE");
    }
    const auto model = load(arguments.plain[1], false, true);
    const auto text = contents(arguments.plain[2]);
    const int size = static_cast<int>(text.size());
    Ids ids(text.size() + 8);
    // The model says whether a first token goes before the text; marks of control tokens in the text are text.
    const auto * vocabulary = llama_model_get_vocab(model.get());
    const int count = llama_tokenize(vocabulary, text.data(), size, ids.data(), static_cast<int>(ids.size()), true, false);
    if (count < 0) {
        refuse("cannot tokenise " + arguments.plain[2]);
    }
    for (int at = 0; at < count; at++) {
        printf("%d%s", ids[at], at + 1 < count ? "," : "\n");
    }
}

// What is read off one row of logits.
struct Row {
    std::vector<std::pair<llama_token, double>> top; // with natural logarithms of probabilities, highest first
    double margin; // between the two highest logits
};

Row read_row(const float * logits, int vocabulary) {
    Ids order(vocabulary);
    for (int id = 0; id < vocabulary; id++) {
        order[id] = id;
    }
    // Of equal logits the lowest token is first.
    const auto higher = [&](int a, int b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
    std::partial_sort(order.begin(), order.begin() + TOP_TOKENS, order.end(), higher);
    const double peak = logits[order[0]];
    double sum = 0;
    for (int id = 0; id < vocabulary; id++) {
        sum += std::exp(logits[id] - peak);
    }
    Row row{{}, peak - logits[order[1]]};
    for (int at = 0; at < TOP_TOKENS; at++) {
        row.top.emplace_back(order[at], logits[order[at]] - peak - std::log(sum));
    }
    return row;
}

std::string shown(const std::vector<std::pair<llama_token, double>> & top) {
    std::string text = "[";
    for (const auto & [id, logprob] : top) {
        char pair[64];
        snprintf(pair, sizeof pair, "%s[%d,%.5f]", text.size() > 1 ? "," : "", id, logprob);
        text += pair;
    }
    return text + "]";
}

template <typename Values, typename Show> std::string joined(const Values & values, Show show) {
    std::string text = "[";
    for (const auto & value : values) {
        text += (text.size() > 1 ? "," : "") + show(value);
    }
    return text + "]";
}

std::string rounded(double value) {
    char text[32];
    snprintf(text, sizeof text, "%.5f", value);
    return text;
}

std::string hex_of(const llama_vocab * vocabulary, const Ids & ids) {
    std::string text;
    for (const llama_token id : ids) {
        char piece[256];
        const int size = llama_token_to_piece(vocabulary, id, piece, sizeof piece, 0, true);
        for (int at = 0; at < size; at++) {
            char byte[3];
            snprintf(byte, sizeof byte, "%02x", static_cast<unsigned char>(piece[at]));
            text += byte;
        }
    }
    return text;
}

void reference(Arguments arguments) {
    const int threads = number(arguments, "--threads", 1);
    const auto inside = list(arguments, "--at", "");
    const bool exact = arguments.options.erase("--f32") > 0;
    refuse_the_rest(arguments);
    if (arguments.plain.size() != 4) {
        refuse("usage: llama_bench reference MODEL IDS_FILE N [--threads 1] [--at 600,1000] [--f32]");
    }
    const auto steps = numbers("N", arguments.plain[3]);
    // Weights as the file has them, so that no layout of one machine's instructions shows in the numbers.
    const auto model = load(arguments.plain[1], false, false);
    const auto * vocabulary = llama_model_get_vocab(model.get());
    const int size = llama_vocab_n_tokens(vocabulary);
    const Ids prompt = numbers("IDS_FILE", contents(arguments.plain[2]));
    const int length = static_cast<int>(prompt.size());
    if (length == 0 || length > BATCH_TOKENS_MAX || steps.size() != 1 || steps[0] == 0) {
        refuse("there must be 1 to " + std::to_string(BATCH_TOKENS_MAX) + " tokens and at least one step");
    }
    for (const int id : prompt) {
        if (id >= size) {
            refuse("token " + std::to_string(id) + " is outside the vocabulary");
        }
    }
    auto params = context_params((length + steps[0] + CELLS_MULTIPLE - 1) / CELLS_MULTIPLE * CELLS_MULTIPLE, 1, threads);
    if (exact) {
        params.type_k = params.type_v = GGML_TYPE_F32;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    const auto context = open(model.get(), params);
    Batch batch;
    for (int at = 0; at < length; at++) {
        const bool asked = std::find(inside.begin(), inside.end(), at + 1) != inside.end();
        batch.add(prompt[at], at, 0, asked || at + 1 == length);
    }
    batch.run(context.get());
    std::vector<std::string> tops_inside;
    for (const int known : inside) {
        if (known == 0 || known > length) {
            refuse("--at: the prompt has " + std::to_string(length) + " tokens, not " + std::to_string(known));
        }
        const auto row = read_row(llama_get_logits_ith(context.get(), known - 1), size);
        tops_inside.push_back("[" + std::to_string(known) + "," + shown(row.top) + "]");
    }
    Ids greedy;
    std::vector<Row> rows;
    const float * logits = llama_get_logits_ith(context.get(), length - 1);
    while (true) {
        rows.push_back(read_row(logits, size));
        greedy.push_back(rows.back().top[0].first);
        if (static_cast<int>(greedy.size()) == steps[0] || llama_vocab_is_eog(vocabulary, greedy.back())) {
            break;
        }
        batch.add(greedy.back(), length + static_cast<int>(greedy.size()) - 1, 0, true);
        batch.run(context.get());
        logits = llama_get_logits_ith(context.get(), 0);
    }
    const auto id = [](llama_token token) { return std::to_string(token); };
    const std::vector<Row> first(rows.begin(), rows.begin() + std::min<size_t>(rows.size(), TOP_STEPS));
    printf("{\"prompt_ids\":%s,\n", joined(prompt, id).c_str());
    printf(" \"greedy_ids\":%s,\n", joined(greedy, id).c_str());
    printf(" \"greedy_logprobs\":%s,\n", joined(rows, [](const Row & row) { return rounded(row.top[0].second); }).c_str());
    printf(" \"top1_top2_margin\":%s,\n", joined(rows, [](const Row & row) { return rounded(row.margin); }).c_str());
    printf(" \"top5_first8\":%s,\n", joined(first, [](const Row & row) { return shown(row.top); }).c_str());
    printf(" \"top5_inside\":%s,\n", joined(tops_inside, [](const std::string & top) { return top; }).c_str());
    printf(" \"text_hex\":\"%s\"}\n", hex_of(vocabulary, greedy).c_str());
}

void quiet(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

void run(int count, char ** values) {
    const auto arguments = read_arguments(count, values, {"--unified", "--f32"});
    if (arguments.plain.empty()) {
        refuse("usage: llama_bench MODEL [--threads 2] [--context 512] [--batches 1,4,16] [--runs 3] [--unified]");
    }
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    const std::string & mode = arguments.plain[0];
    if (mode == "requantise") {
        requantise(arguments);
    } else if (mode == "tokenise") {
        tokenise(arguments);
    } else if (mode == "reference") {
        reference(arguments);
    } else {
        bench(arguments);
    }
    llama_backend_free();
}

} // namespace

int main(int count, char ** values) {
    try {
        run(count, values);
        return 0;
    } catch (const std::exception & error) {
        fprintf(stderr, "llama_bench: %s\n", error.what());
        return 1;
    }
}
