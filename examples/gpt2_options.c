/* The command line of gpt2: a table of options, from which the help is printed too. */
#include "gpt2.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum option_kind { SECTION, FLAG, TEXT, INTEGER, NUMBER };

struct option {
    enum option_kind kind;
    const char *name, *value, *help;
    size_t offset; /* in struct gpt2_settings */
    double least;  /* of an integer or a number */
};

#define OPTION(kind, name, value, member, least, help)                                             \
    {                                                                                              \
        kind, name, value, help, offsetof(struct gpt2_settings, member), least                     \
    }

static const struct option options[] = {
    {SECTION, "The model: small by default, for a CPU", NULL, NULL, 0, 0},
    OPTION(TEXT, "--size", "NAME", size, 0, "124M, 350M, 774M or 1.5B (gpt2, gpt2-medium, …)"),
    OPTION(INTEGER, "--layers", "N", layers, 1, "number of blocks (4)"),
    OPTION(INTEGER, "--heads", "N", heads, 1, "heads of an attention (4; with --from: width / 64)"),
    OPTION(INTEGER, "--width", "N", width, 1, "numbers for each token (128)"),
    OPTION(INTEGER, "--context", "N", context, 1, "tokens in a sequence (128)"),
    OPTION(INTEGER, "--vocabulary", "N", vocabulary, 1, "tokens (256 for bytes, otherwise 50257)"),
    OPTION(NUMBER, "--dropout", "P", dropout, 0, "probability (0)"),
    OPTION(TEXT, "--from", "FILE", from, 0, "start with weights of Hugging Face's, safetensors"),

    {SECTION, "The data", NULL, NULL, 0, 0},
    OPTION(TEXT, "--data", "FILE", data, 0, "what to learn; without one, nothing is trained"),
    OPTION(TEXT, "--tokens", "KIND", tokens, 0,
           "bytes, u16 or u32 (u16 for names that end with .bin, otherwise bytes)"),

    {SECTION, "Training", NULL, NULL, 0, 0},
    OPTION(TEXT, "--device", "NAME", device, 0, "cpu, cuda, … (cpu)"),
    OPTION(FLAG, "--bf16", NULL, bf16, 0, "products in bf16"),
    OPTION(FLAG, "--graph", NULL, graph, 0,
           "capture a step, and launch it with one call (docs/cuda.md)"),
    OPTION(INTEGER, "--batch", "N", batch, 1, "sequences of a process at once (8)"),
    OPTION(INTEGER, "--accumulate", "N", accumulate, 1, "batches for one step (1)"),
    OPTION(INTEGER, "--steps", "N", steps, 0, "steps in all (300)"),
    OPTION(NUMBER, "--lr", "X", lr, 0, "highest learning rate (6e-4)"),
    OPTION(NUMBER, "--min-lr", "X", min_lr, 0, "last learning rate (a tenth of --lr)"),
    OPTION(INTEGER, "--warmup", "N", warmup, 0, "steps until the highest one (a tenth of --steps)"),
    OPTION(NUMBER, "--weight-decay", "X", weight_decay, 0, "of AdamW, for matrices (0.1)"),
    OPTION(NUMBER, "--clip", "X", clip, 0, "greatest norm of all gradients (1; 0: any)"),
    OPTION(INTEGER, "--seed", "N", seed, 0, "of weights, order and dropout (1)"),

    {SECTION, "Sharding (docs/fsdp.md)", NULL, NULL, 0, 0},
    OPTION(FLAG, "--fsdp", NULL, fsdp, 0,
           "parameters, gradients and optimizer state divided among the processes"),
    OPTION(TEXT, "--strategy", "NAME", strategy, 0,
           "full_shard, shard_grad_op, no_shard or hybrid_shard (full_shard)"),
    OPTION(FLAG, "--no-shared-memory", NULL, no_shared_memory, 0,
           "gather parameters on one host, too"),

    {SECTION, "Results", NULL, NULL, 0, 0},
    OPTION(INTEGER, "--log", "N", log_every, 1, "steps for each line of progress (10)"),
    OPTION(TEXT, "--peak", "X", peak, 0,
           "TFLOP/s of a device, or a100, h100, h200, b200 (measured with a product)"),
    OPTION(TEXT, "--out", "DIR", out, 0, "for loss.svg, loss.csv and checkpoints"),
    OPTION(INTEGER, "--save-every", "N", save_every, 1, "steps for each checkpoint (none)"),
    OPTION(FLAG, "--resume", NULL, resume, 0, "go on from the last checkpoint in --out"),
    OPTION(INTEGER, "--memory", "N", memory, 2,
           "draw the memory of each rank over step N in --out"),
    OPTION(TEXT, "--save", "FILE", save, 0, "weights at the end, as Hugging Face has them"),

    {SECTION, "Text at the end", NULL, NULL, 0, 0},
    OPTION(INTEGER, "--generate", "N", generate, 0, "tokens (200)"),
    OPTION(TEXT, "--prompt", "TEXT", prompt, 0,
           "text before them; for tokens, numbers: \"464 2068\""),
    OPTION(NUMBER, "--temperature", "X", temperature, 0, "(0.8; 0: always the most likely token)"),
    OPTION(INTEGER, "--top-k", "N", top_k, 0, "only of the N most likely tokens (40; 0: of all)"),
    OPTION(TEXT, "--vocabulary-file", "FILE", vocabulary_file, 0,
           "vocab.json, for the texts of tokens"),
    OPTION(FLAG, "--help", NULL, data, 0, "this text"),
};
enum { OPTIONS = sizeof options / sizeof options[0] };

static void print_help(void)
{
    printf(
        "usage: gpt2 --data FILE [OPTION…]\n\n"
        "Trains GPT-2, alone or under tdrun, and writes text with it. docs/gpt2.md has examples.\n");
    for (int i = 0; i < OPTIONS; i++) {
        const struct option *option = &options[i];
        char left[48];
        snprintf(left, sizeof left, "%s %s", option->name, option->value ? option->value : "");
        if (option->kind == SECTION)
            printf("\n%s:\n", option->name);
        else
            printf("  %-24s %s\n", left, option->help);
    }
}

/* The number of letters to insert, to remove or to replace between two words. */
static int distance_of(const char *a, const char *b)
{
    enum { LONGEST = 32 };
    int row[LONGEST + 1], length = (int)strlen(b);
    if (length > LONGEST)
        return LONGEST;
    for (int k = 0; k <= length; k++)
        row[k] = k;
    for (int i = 1; a[i - 1]; i++) {
        int corner = row[0];
        row[0] = i;
        for (int k = 1; k <= length; k++) {
            int replaced = corner + (a[i - 1] != b[k - 1]);
            int shorter = row[k] < row[k - 1] ? row[k] : row[k - 1];
            corner = row[k];
            row[k] = replaced < shorter + 1 ? replaced : shorter + 1;
        }
    }
    return row[length];
}

/* The option of this name; NULL for none, which is printed with the nearest one. */
static const struct option *find_option(const char *name)
{
    const struct option *nearest = NULL;
    int least = 4; /* further away is no mistake of typing */
    for (int i = 0; i < OPTIONS; i++) {
        if (options[i].kind == SECTION)
            continue;
        int distance = distance_of(name, options[i].name);
        if (distance == 0)
            return &options[i];
        if (distance < least) {
            least = distance;
            nearest = &options[i];
        }
    }
    fprintf(stderr, "gpt2: there is no option %s", name);
    if (nearest)
        fprintf(stderr, "; did you mean %s?\n", nearest->name);
    else
        fprintf(stderr, "; --help lists all\n");
    return NULL;
}

static bool set_option(const struct option *option, const char *value,
                       struct gpt2_settings *settings)
{
    void *member = (char *)settings + option->offset;
    char *end = NULL;
    errno = 0;
    double number = option->kind == INTEGER  ? (double)strtoll(value, &end, 10)
                    : option->kind == NUMBER ? strtod(value, &end)
                                             : 0;
    if (option->kind == TEXT) {
        *(const char **)member = value;
        return true;
    }
    if (end == value || *end || errno || !isfinite(number) || number < option->least) {
        fprintf(stderr, "gpt2: %s %s: a%s number of at least %g was expected\n", option->name,
                value, option->kind == INTEGER ? " whole" : "", option->least);
        return false;
    }
    if (option->kind == INTEGER)
        *(int64_t *)member = strtoll(value, NULL, 10);
    else
        *(double *)member = number;
    return true;
}

int gpt2_strategy(const char *name)
{
    static const char *const names[] = {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard"};
    for (int i = 0; i < 4; i++)
        if (!strcmp(name, names[i]))
            return i; /* the values of td_fsdp_strategy */
    return -1;
}

/* What options must be together. */
static bool check_settings(const struct gpt2_settings *settings)
{
    const char *wrong = NULL;
    if (settings->size && !gpt2_size(settings->size))
        wrong = "--size is 124M, 350M, 774M or 1.5B; other models are given by --layers, --heads, "
                "--width and --context";
    else if (settings->size && settings->from)
        wrong = "--from has the sizes of its model: leave --size out";
    else if (settings->tokens && strcmp(settings->tokens, "bytes") &&
             strcmp(settings->tokens, "u16") && strcmp(settings->tokens, "u32"))
        wrong = "--tokens is bytes, u16 or u32";
    else if (settings->lr == 0)
        wrong = "--lr must be above 0";
    else if (settings->dropout >= 1)
        wrong = "--dropout must be below 1";
    else if (!settings->data && !settings->from && !settings->save)
        wrong = "--data FILE is missing: what to learn, any text; --help lists all options";
    else if ((settings->save_every || settings->resume) && !settings->out)
        wrong = "checkpoints need a directory: --out DIR";
    else if (settings->memory && !settings->out)
        wrong = "the drawing of the memory needs a directory: --out DIR";
    else if ((settings->strategy || settings->no_shared_memory) && !settings->fsdp)
        wrong = "--strategy and --no-shared-memory are for --fsdp";
    else if (settings->strategy && gpt2_strategy(settings->strategy) < 0)
        wrong = "--strategy is full_shard, shard_grad_op, no_shard or hybrid_shard";
    if (wrong)
        fprintf(stderr, "gpt2: %s\n", wrong);
    return !wrong;
}

bool gpt2_read_settings(int argc, char **argv, struct gpt2_settings *settings, int *code)
{
    *settings = (struct gpt2_settings){.device = "cpu",
                                       .batch = 8,
                                       .accumulate = 1,
                                       .steps = 300,
                                       .warmup = -1,
                                       .seed = 1,
                                       .lr = 6e-4,
                                       .min_lr = -1,
                                       .weight_decay = 0.1,
                                       .clip = 1,
                                       .log_every = 10,
                                       .generate = 200,
                                       .temperature = 0.8,
                                       .top_k = 40};
    *code = 2;
    for (int i = 1; i < argc; i++) {
        const struct option *option = find_option(argv[i]);
        if (!option)
            return false;
        if (!strcmp(option->name, "--help")) {
            print_help();
            *code = 0;
            return false;
        }
        if (option->kind == FLAG) {
            *(bool *)((char *)settings + option->offset) = true;
            continue;
        }
        if (++i == argc) {
            fprintf(stderr, "gpt2: %s needs a value: %s\n", option->name, option->help);
            return false;
        }
        if (!set_option(option, argv[i], settings))
            return false;
    }
    if (settings->warmup < 0)
        settings->warmup = settings->steps / 10;
    if (settings->min_lr < 0)
        settings->min_lr = settings->lr / 10;
    return check_settings(settings);
}
