/* The recording is text, a line for each fact; see record_training.py for the lines. They are read in order, and
 * only once. */
#include "training_recording.h"

#include "runner.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

struct recording {
    FILE *file;
    const char *network;
    int step; /* of the next loss */
    char *at; /* what is left of the line */
    char line[512];
};

/* A figure of a tensor is held against the recorded one within this. */
struct tolerance {
    double of_norm; /* for norms and sums: of the whole tensor */
    double floor;   /* added to that */
};

/* The next line, whose first word must be `kind`. */
static void next_line(struct recording *recording, const char *kind)
{
    if (!fgets(recording->line, sizeof recording->line, recording->file))
        FAIL("%s: the recording ends before «%s»", recording->network, kind);
    recording->line[strcspn(recording->line, "\n")] = 0;
    size_t length = strlen(kind);
    if (strncmp(recording->line, kind, length) != 0 || recording->line[length] != ' ')
        FAIL("%s: the recording has «%s», not a line of «%s»", recording->network, recording->line,
             kind);
    recording->at = recording->line + length;
}

static double next_number(struct recording *recording)
{
    char *end;
    double number = strtod(recording->at, &end);
    if (end == recording->at)
        FAIL("%s: a number is missing in «%s»", recording->network, recording->line);
    recording->at = end;
    return number;
}

static uint64_t next_integer(struct recording *recording, int base)
{
    char *end;
    uint64_t number = strtoull(recording->at, &end, base);
    if (end == recording->at)
        FAIL("%s: a number is missing in «%s»", recording->network, recording->line);
    recording->at = end;
    return number;
}

struct recording *recording_open(const char *network)
{
    struct recording *recording = calloc(1, sizeof *recording);
    CHECK(recording);
    recording->network = network;
    recording->file = fopen(TD_TRAINING_CURVES, "r");
    if (!recording->file)
        FAIL("cannot read %s", TD_TRAINING_CURVES);
    char wanted[100];
    snprintf(wanted, sizeof wanted, "network %s\n", network);
    do {
        if (!fgets(recording->line, sizeof recording->line, recording->file))
            FAIL("%s has no network %s", TD_TRAINING_CURVES, network);
    } while (strcmp(recording->line, wanted) != 0);
    return recording;
}

void recording_close(struct recording *recording)
{
    fclose(recording->file);
    free(recording);
}

/* The parts of a tensor that are recorded: `count` elements, evenly apart. */
enum { SAMPLE = 8 };

static int64_t sample_count(int64_t elements)
{
    return elements < SAMPLE ? elements : SAMPLE;
}

static uint32_t crc32_of(const void *data, size_t size)
{
    uint32_t crc = ~0u;
    const unsigned char *bytes = data;
    for (size_t i = 0; i < size; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (-(crc & 1u) & 0xedb88320u);
    }
    return ~crc;
}

static const float *data_of(struct recording *recording, const char *name, td_tensor *tensor)
{
    if (!tensor || td_tensor_dtype(tensor) != TD_F32 || !td_tensor_is_contiguous(tensor))
        FAIL("%s, %s: there is no contiguous f32 tensor", recording->network, name);
    return td_tensor_data(tensor);
}

void recording_check_weight(struct recording *recording, const char *name, td_tensor *weight)
{
    const float *data = data_of(recording, name, weight);
    int64_t elements = td_tensor_numel(weight);
    next_line(recording, "weight");
    CHECK_EQ(elements, next_integer(recording, 10));
    uint32_t checksum = (uint32_t)next_integer(recording, 16);
    int64_t count = sample_count(elements);
    for (int64_t i = 0; i < count; i++) {
        int64_t place = i * elements / count;
        uint32_t recorded = (uint32_t)next_integer(recording, 16), bits;
        memcpy(&bits, &data[place], sizeof bits);
        if (bits != recorded)
            FAIL("%s, weight %s, element %lld: the bits are %08x, recorded are %08x",
                 recording->network, name, (long long)place, bits, recorded);
    }
    if (crc32_of(data, td_tensor_nbytes(weight)) != checksum)
        FAIL("%s, weight %s: some element is not the recorded one", recording->network, name);
}

double recording_norm(td_tensor *tensor)
{
    const float *data = td_tensor_data(tensor);
    double sum = 0;
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++)
        sum += (double)data[i] * data[i];
    return sqrt(sum);
}

/* The sum of all elements, each times how_much() of record_training.py. */
static double weighed(const float *data, int64_t elements)
{
    double sum = 0;
    for (int64_t i = 0; i < elements; i++)
        sum += (double)data[i] * ((double)(i * 7919 % 1000) / 1000);
    return sum;
}

static void check_figure(struct recording *recording, const char *what, const char *name,
                         double value, double recorded, double allowed)
{
    if (!(fabs(value - recorded) <= allowed))
        FAIL("%s, %s of %s: %.9g, recorded is %.9g; they may differ by %.3g", recording->network,
             what, name, value, recorded, allowed);
}

/* Norm, sum and some elements. One element may differ by its own share, or by that of an average
 * element where it is smaller than that. */
static void check_tensor(struct recording *recording, const char *what, const char *name,
                         td_tensor *tensor, struct tolerance tolerance)
{
    const float *data = data_of(recording, name, tensor);
    int64_t elements = td_tensor_numel(tensor), count = sample_count(elements);
    double norm = next_number(recording), dot = next_number(recording);
    double allowed = tolerance.of_norm * norm + tolerance.floor;
    check_figure(recording, what, name, recording_norm(tensor), norm, allowed);
    check_figure(recording, what, name, weighed(data, elements), dot,
                 allowed * sqrt((double)elements));
    double average = norm / sqrt((double)elements);
    for (int64_t i = 0; i < count; i++) {
        double recorded = next_number(recording);
        double share = tolerance.of_norm * fmax(fabs(recorded), average) + tolerance.floor;
        check_figure(recording, what, name, (double)data[i * elements / count], recorded, share);
    }
}

void recording_check_grad(struct recording *recording, const char *name, td_tensor *grad,
                          double total)
{
    next_line(recording, "grad");
    check_tensor(recording, "gradient", name, grad, (struct tolerance){1e-5, 1e-7 * total});
}

void recording_check_loss(struct recording *recording, double loss)
{
    next_line(recording, "loss");
    double recorded = next_number(recording);
    if (!(fabs(loss - recorded) <= 1e-4 * fabs(recorded)))
        FAIL("%s, step %d: the loss is %.9g, recorded is %.9g, which is %.2g apart",
             recording->network, recording->step, loss, recorded,
             fabs(loss - recorded) / fabs(recorded));
    recording->step++;
}

void recording_check_final(struct recording *recording, const char *name, td_tensor *parameter)
{
    next_line(recording, "final");
    if (strcmp(recording->at, " unsure") != 0)
        check_tensor(recording, "the last value", name, parameter, (struct tolerance){1e-3, 0});
}

void recording_check_next(struct recording *recording)
{
    next_line(recording, "next");
    {
        TD_SCOPE;
        td_tensor *number = td_empty(NULL, 0, TD_I64, NULL);
        CHECK(number);
        CHECK_OK(td_random_(number, NULL));
        CHECK_EQ(*(int64_t *)td_tensor_data(number), next_integer(recording, 10));
    }
}
