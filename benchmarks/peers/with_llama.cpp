// A build of llama.cpp or of its fork ik_llama.cpp, under worker.py's protocol: its decode loop, without a sampler.
//
//     with_llama FILE.gguf THREADS
//
// README.md has the commands that build it; -DIK_LLAMA for the fork, whose weights are repacked while they are loaded.
// Commands are told apart by their words: they come from cpu.py alone.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "llama.h"

#ifdef IK_LLAMA
constexpr const char* NAME = "ik_llama.cpp, repacked";
#else
constexpr const char* NAME = "llama.cpp";
#endif
constexpr int STEPS = 12, ROWS = 32, SHORT = 128, LONG = 4096, PREFILL = 512, CHUNK = 512;  // as in worker.py

struct Row {
  int sequence, first, count;
};

static llama_context* context;
static llama_batch batch;
static std::set<int> filled;

static void forget(int sequence, int from) {
#ifdef IK_LLAMA
  llama_kv_cache_seq_rm(context, sequence, from, -1);
#else
  llama_memory_seq_rm(llama_get_memory(context), sequence, from, -1);
#endif
}

static double step(const std::vector<Row>& rows) {  // seconds
  batch.n_tokens = 0;
  for (const Row& row : rows) {
    for (int position = row.first; position < row.first + row.count; ++position) {
      const int n = batch.n_tokens++;
      batch.token[n] = 1000 + (int)((row.sequence * 7919LL + position * 104729LL) % 30000);
      batch.pos[n] = position;
      batch.n_seq_id[n] = 1;
      batch.seq_id[n][0] = row.sequence;
      batch.logits[n] = position == row.first + row.count - 1;
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  if (llama_decode(context, batch) != 0) {
    fprintf(stderr, "llama_decode failed\n");
    exit(1);
  }
  llama_get_logits(context);  // waits for the result
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

static std::vector<double> prefill(int tokens) {
  forget(ROWS + 1, 0);
  return {step({{ROWS + 1, 0, tokens}})};
}

static std::vector<double> decode(int rows, int length) {  // sequence ROWS is the long one
  std::vector<int> sequences;
  for (int row = 0; row < rows; ++row) sequences.push_back(length == SHORT ? row : ROWS);
  for (int sequence : sequences) {
    if (!filled.insert(sequence).second) continue;
    for (int first = 0; first < length; first += CHUNK) step({{sequence, first, length - first < CHUNK ? length - first : CHUNK}});
  }
  std::vector<double> seconds;
  for (int n = 0; n < STEPS; ++n) {
    std::vector<Row> all;
    for (int sequence : sequences) all.push_back({sequence, length + n, 1});
    seconds.push_back(step(all));
  }
  for (int sequence : sequences) forget(sequence, length);
  return seconds;
}

static int number(const char* line, const char* key) {
  const char* at = strstr(line, key);
  return at ? atoi(at + strlen(key)) : 0;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  llama_backend_init();
  llama_model_params model_params = llama_model_default_params();
  llama_context_params params = llama_context_default_params();
#ifdef IK_LLAMA
  model_params.use_mmap = false;  // repacked weights are copies
  model_params.repack_tensors = true;
  params.flash_attn = true;
#else
  params.kv_unified = true;
#endif
  params.n_ctx = ROWS * (SHORT + STEPS + 32) + LONG + PREFILL + STEPS;
  params.n_batch = params.n_ubatch = CHUNK;
  params.n_seq_max = ROWS + 2;
  params.n_threads = params.n_threads_batch = atoi(argv[2]);
  llama_model* model = llama_model_load_from_file(argv[1], model_params);
  context = model ? llama_init_from_model(model, params) : nullptr;
  if (!context) return 1;
  batch = llama_batch_init(CHUNK, 0, 1);
  printf("{\"engine\": \"%s\"}\n", NAME);
  fflush(stdout);
  char line[256];
  while (fgets(line, sizeof line, stdin)) {
    const std::vector<double> seconds = strstr(line, "\"prefill\"") ? prefill(number(line, "\"tokens\":"))
                                                                   : decode(number(line, "\"batch\":"), number(line, "\"context\":"));
    printf("{\"seconds\": [");
    for (size_t i = 0; i < seconds.size(); ++i) printf("%s%.9g", i ? ", " : "", seconds[i]);
    printf("]}\n");
    fflush(stdout);
  }
}
