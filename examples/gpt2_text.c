/* Text of GPT-2: the next token by chance, again and again; and the texts of tokens. */
#include "gpt2.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Hugging Face's vocab.json ---------------------------------------------------------------------
 *
 * {"!": 0, …, "\u0120the": 262, …}: a text stands for bytes, each written as one character. Bytes that print are
 * themselves, as characters of Latin-1; the others, in order, are the characters from 256 on. */

static bool prints(int byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xff && byte != 0xad);
}

/* The byte that a character stands for; -1 for none. */
static int byte_of(unsigned character)
{
    if (character < 256)
        return prints((int)character) ? (int)character : -1;
    for (int byte = 0, next = 256; byte < 256; byte++)
        if (!prints(byte) && (unsigned)next++ == character)
            return byte;
    return -1;
}

/* One character of a JSON string, in UTF-8 or escaped; 0 where there is none. */
static unsigned next_character(const char **at)
{
    const unsigned char *c = (const unsigned char *)*at;
    unsigned character = c[0];
    if (c[0] == '\\' && c[1] == 'u' && sscanf(*at + 2, "%4x", &character) == 1)
        *at += 6;
    else if (c[0] == '\\' && strchr("\"\\/", c[1])) {
        character = c[1];
        *at += 2;
    } else if (c[0] >= 0xc3 && c[0] < 0xe0 && (c[1] & 0xc0) == 0x80) {
        character = (c[0] & 0x1fu) << 6 | (c[1] & 0x3fu);
        *at += 2;
    } else if (c[0] == '\\' || c[0] == '"' || c[0] > '~' || c[0] < ' ')
        return 0;
    else
        (*at)++;
    return character;
}

static void skip_space(const char **at)
{
    while (isspace((unsigned char)**at))
        (*at)++;
}

/* Skips one character behind white space, if it is this one. */
static bool skip(const char **at, char character)
{
    skip_space(at);
    if (**at != character)
        return false;
    (*at)++;
    return true;
}

/* Reads one "text": number. The bytes go to `text`, which has room for `most`. */
static bool read_entry(const char **at, char *text, size_t most, size_t *length, int64_t *token)
{
    char *end;
    *length = 0;
    if (!skip(at, '"'))
        return false;
    while (**at != '"') {
        int byte = byte_of(next_character(at));
        if (byte < 0 || *length == most)
            return false;
        text[(*length)++] = (char)byte;
    }
    (*at)++;
    if (!skip(at, ':'))
        return false;
    *token = strtoll(*at, &end, 10);
    bool good = end != *at && *token >= 0 && *token < 1 << 24;
    *at = end;
    return good;
}

static td_status add_text(struct gpt2_vocabulary *vocabulary, int64_t token, const char *text,
                          size_t length)
{
    if (token >= vocabulary->count) {
        int64_t count = token + 1 > 2 * vocabulary->count ? token + 1 : 2 * vocabulary->count;
        td_bytes *texts = realloc(vocabulary->texts, (size_t)count * sizeof *texts);
        if (!texts)
            return td_fail(TD_ERR_NOMEM, "out of memory");
        memset(texts + vocabulary->count, 0, (size_t)(count - vocabulary->count) * sizeof *texts);
        vocabulary->texts = texts;
        vocabulary->count = count;
    }
    td_bytes_free(&vocabulary->texts[token]);
    return td_bytes_copy(text, length, &vocabulary->texts[token]);
}

static td_status read_entries(const char *path, const char *json,
                              struct gpt2_vocabulary *vocabulary)
{
    const char *at = json;
    bool good = skip(&at, '{'), more = good;
    while (more) {
        char text[1024];
        size_t length;
        int64_t token;
        good = read_entry(&at, text, sizeof text, &length, &token);
        td_status status = good ? add_text(vocabulary, token, text, length) : TD_OK;
        if (status)
            return status;
        more = good && skip(&at, ',');
    }
    if (good && skip(&at, '}'))
        return TD_OK;
    return td_fail(
        TD_ERR_INVALID,
        "%s: {\"text\": number, …} of the vocabulary of GPT-2 was expected at offset %td", path,
        at - json);
}

td_status gpt2_read_vocabulary(const char *path, struct gpt2_vocabulary *vocabulary)
{
    *vocabulary = (struct gpt2_vocabulary){0};
    char *json = NULL;
    size_t room = 0;
    FILE *file = fopen(path, "r");
    ssize_t size = file ? getdelim(&json, &room, '\0', file) : -1;
    td_status status = size < 0 ? td_fail(TD_ERR_SYSTEM, "%s: %s", path,
                                          file && feof(file) ? "empty" : strerror(errno))
                                : read_entries(path, json, vocabulary);
    if (file)
        fclose(file);
    free(json);
    if (status)
        gpt2_free_vocabulary(vocabulary);
    return status;
}

void gpt2_free_vocabulary(struct gpt2_vocabulary *vocabulary)
{
    for (int64_t i = 0; i < vocabulary->count; i++)
        td_bytes_free(&vocabulary->texts[i]);
    free(vocabulary->texts);
    *vocabulary = (struct gpt2_vocabulary){0};
}

static void print_token(const struct gpt2_vocabulary *vocabulary, bool bytes, int64_t token)
{
    if (bytes && token < 256)
        putchar((int)token);
    else if (token < vocabulary->count && vocabulary->texts[token].size)
        fwrite(vocabulary->texts[token].data, 1, vocabulary->texts[token].size, stdout);
    else
        printf("%lld ", (long long)token);
}

/* ---- Sampling ---------------------------------------------------------------------------------------- */

static int compare_downwards(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The least of the `k` greatest numbers. */
static float least_of_top(const float *numbers, float *room, int64_t count, int64_t k)
{
    memcpy(room, numbers, (size_t)count * sizeof *room);
    qsort(room, (size_t)count, sizeof *room, compare_downwards);
    return room[k - 1];
}

/* One of the tokens, by the probabilities softmax(logits / temperature) of the top_k; `chance` is in [0, 1). */
static int64_t choose(const float *logits, float *room, int64_t count,
                      const struct gpt2_settings *settings, double chance)
{
    int64_t best = 0, k = settings->top_k ? settings->top_k : count;
    for (int64_t i = 1; i < count; i++)
        best = logits[i] > logits[best] ? i : best;
    if (settings->temperature == 0)
        return best;
    float least = k < count ? least_of_top(logits, room, count, k) : -INFINITY;
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        double power = exp((double)(logits[i] - logits[best]) / settings->temperature);
        room[i] = logits[i] >= least ? (float)power : 0;
        sum += (double)room[i];
    }
    double left = chance * sum;
    for (int64_t i = 0; i < count; i++)
        if ((left -= (double)room[i]) < 0)
            return i;
    return best; /* for roundings */
}

/* The logits behind the last token, on the host. */
static td_tensor *next_logits(td_module *gpt2, const int64_t *tokens, int64_t count,
                              td_device *device)
{
    TD_SCOPE;
    td_tensor *x = td_from_array(tokens, TD_SHAPE(1, count), TD_I64, td_device_get("cpu"));
    td_tensor *logits = td_select(td_forward(gpt2, td_tensor_to(x, device)), 1, -1);
    logits = td_tensor_to(td_to_dtype(logits, TD_F32), td_device_get("cpu"));
    return td_scope_return(td_contiguous(logits));
}

/* The tokens of a prompt: its bytes, or numbers. Returns their number, at least 1; -1 for a prompt that is wrong. */
static int64_t read_prompt(const char *prompt, bool bytes, const struct gpt2_config *config,
                           int64_t *tokens)
{
    int64_t count = 0;
    if (bytes)
        for (const char *at = prompt ? prompt : "\n"; *at; at++)
            tokens[count++] = (unsigned char)*at;
    while (!bytes && prompt && *prompt) {
        char *end;
        tokens[count] = strtoll(prompt, &end, 10);
        if (end == prompt || tokens[count] < 0 || tokens[count] >= config->vocabulary)
            return -1;
        count++;
        prompt = end + strspn(end, " ,");
    }
    if (!count)
        tokens[count++] = bytes ? '\n' : config->vocabulary - 1; /* <|endoftext|> is the last one */
    return count;
}

static td_status continue_text(td_module *gpt2, const struct gpt2_config *config,
                               const struct gpt2_settings *settings, td_device *device,
                               const struct gpt2_vocabulary *vocabulary, bool bytes,
                               int64_t *tokens, int64_t count)
{
    td_generator *generator = td_generator_create((uint64_t)settings->seed, td_device_get("cpu"));
    float *room = malloc((size_t)config->vocabulary * sizeof *room);
    td_status status = generator && room ? TD_OK : td_fail(TD_ERR_NOMEM, "out of memory");
    for (int64_t made = 0; !status && made < settings->generate; made++) {
        TD_SCOPE;
        int64_t first = count > config->context ? count - config->context : 0;
        td_tensor *chance = td_empty(NULL, 0, TD_F64, td_device_get("cpu"));
        td_tensor *logits = next_logits(gpt2, tokens + first, count - first, device);
        status = logits ? td_uniform_(chance, 0, 1, generator) : td_last_status();
        if (status)
            break;
        tokens[count] = choose(td_tensor_data(logits), room, config->vocabulary, settings,
                               td_item(chance));
        print_token(vocabulary, bytes, tokens[count++]);
        fflush(stdout);
    }
    printf("\n");
    free(room);
    td_generator_destroy(generator);
    return status;
}

td_status gpt2_generate(td_module *gpt2, const struct gpt2_config *config,
                        const struct gpt2_settings *settings, td_device *device, bool bytes)
{
    TD_NO_GRAD;
    struct gpt2_vocabulary vocabulary = {0};
    size_t length = settings->prompt ? strlen(settings->prompt) : 0;
    int64_t *tokens = malloc((length + (size_t)settings->generate + 1) * sizeof *tokens);
    int64_t count = tokens ? read_prompt(settings->prompt, bytes, config, tokens) : 0;
    td_status status = !tokens ? td_fail(TD_ERR_NOMEM, "out of memory")
                       : count < 0
                           ? td_fail(TD_ERR_INVALID,
                                     "--prompt \"%s\": numbers of tokens below %lld were expected",
                                     settings->prompt, (long long)config->vocabulary)
                           : TD_OK;
    if (!status && settings->vocabulary_file)
        status = gpt2_read_vocabulary(settings->vocabulary_file, &vocabulary);
    if (!status) {
        for (int64_t i = 0; settings->prompt && i < count; i++)
            print_token(&vocabulary, bytes, tokens[i]);
        status = continue_text(gpt2, config, settings, device, &vocabulary, bytes, tokens, count);
    }
    gpt2_free_vocabulary(&vocabulary);
    free(tokens);
    return status;
}
