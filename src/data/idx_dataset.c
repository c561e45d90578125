/* Datasets of IDX files. The arrays stay in memory as they were in the files; a sample is converted
 * when it is read, bytes by a table of 256 values. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "data/dataset.h"
#include "data/idx.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FASHION_MNIST "fashion-mnist"
#define DEBIAN_DATASETS "/usr/share/datasets"

struct idx_dataset {
    struct td__idx images, labels;
    bool has_labels, raw;
    size_t elements; /* of an image */
    float pixels[256];
};

static int64_t size_of(void *self)
{
    return ((struct idx_dataset *)self)->images.shape[0];
}

static void describe(void *self, td_sample_spec *input, td_sample_spec *target)
{
    struct idx_dataset *dataset = self;
    const struct td__idx *images = &dataset->images;
    bool channel = !dataset->raw && images->ndim == 3;
    *input = (td_sample_spec){.dtype = dataset->raw ? images->dtype : TD_F32,
                              .ndim = images->ndim - 1 + channel,
                              .shape = {1}};
    memcpy(input->shape + channel, images->shape + 1,
           (size_t)(images->ndim - 1) * sizeof input->shape[0]);
    *target = (td_sample_spec){.dtype = TD_I64, .ndim = dataset->has_labels ? 0 : -1};
}

static int64_t label_of(const struct td__idx *labels, int64_t index)
{
    switch (labels->dtype) {
    case TD_U8:
        return ((const uint8_t *)labels->data)[index];
    case TD_I8:
        return ((const int8_t *)labels->data)[index];
    case TD_I16:
        return ((const int16_t *)labels->data)[index];
    default:
        return ((const int32_t *)labels->data)[index];
    }
}

static td_status read_sample(void *self, int64_t index, void *input, void *target)
{
    struct idx_dataset *dataset = self;
    size_t elements = dataset->elements, size = td_dtype_size(dataset->images.dtype);
    const unsigned char *from = dataset->images.data;
    if (elements && dataset->raw) {
        memcpy(input, from + (size_t)index * elements * size, elements * size);
    } else if (elements) {
        float *to = input;
        from += (size_t)index * elements;
        for (size_t i = 0; i < elements; i++)
            to[i] = dataset->pixels[from[i]];
    }
    if (dataset->has_labels)
        *(int64_t *)target = label_of(&dataset->labels, index);
    return TD_OK;
}

static void destroy(void *self)
{
    struct idx_dataset *dataset = self;
    free(dataset->images.data);
    free(dataset->labels.data);
    free(dataset);
}

static const td_dataset_ops idx_dataset_ops = {
    .size = size_of, .describe = describe, .read = read_sample, .destroy = destroy};

/* ---- Making one ------------------------------------------------------------------------------ */

static td_status read_file(const char *path, struct td__idx *idx)
{
    struct td__unpack *unpack = NULL;
    TD_TRY(td__unpack_open(path, &unpack));
    td_status status = td__idx_read(unpack, idx);
    td__unpack_close(unpack);
    return status;
}

static td_status read_files(struct idx_dataset *dataset, const char *images_path,
                            const char *labels_path)
{
    struct td__idx *images = &dataset->images, *labels = &dataset->labels;
    TD_TRY(read_file(images_path, images));
    if (!dataset->raw && images->dtype != TD_U8)
        return td_fail(
            TD_ERR_INVALID,
            "%s: has elements of %s; only bytes can be scaled, TD_PIXELS_RAW takes others "
            "as they are",
            images_path, td_dtype_name(images->dtype));
    dataset->elements = 1;
    for (int d = 1; d < images->ndim; d++)
        dataset->elements *= (size_t)images->shape[d];
    if (!labels_path)
        return TD_OK;
    TD_TRY(read_file(labels_path, labels));
    dataset->has_labels = true;
    if (labels->ndim != 1 || labels->dtype == TD_F32 || labels->dtype == TD_F64)
        return td_fail(TD_ERR_INVALID,
                       "%s: has %d dimensions of %s; labels are one dimension of integers",
                       labels_path, labels->ndim, td_dtype_name(labels->dtype));
    if (labels->shape[0] != images->shape[0])
        return td_fail(TD_ERR_INVALID,
                       "%s has %" PRId64 " images, %s has %" PRId64
                       " labels; both must have the same number",
                       images_path, images->shape[0], labels_path, labels->shape[0]);
    return TD_OK;
}

/* In f32 at each step, as torchvision's ToTensor and Normalize. */
static void make_pixels(struct idx_dataset *dataset, const td_idx_options *options)
{
    float mean = 0, std = 1;
    if (options->pixels == TD_PIXELS_NORMALIZED && options->std != 0) {
        mean = (float)options->mean;
        std = (float)options->std;
    }
    for (int byte = 0; byte < 256; byte++)
        dataset->pixels[byte] = ((float)byte / 255.0f - mean) / std;
}

static td_status check_options(const char *call, const td_idx_options *options)
{
    if (options->pixels < TD_PIXELS_NORMALIZED || options->pixels > TD_PIXELS_RAW)
        return td_fail(TD_ERR_INVALID, "%s: pixels is %d, which is not a td_pixels", call,
                       (int)options->pixels);
    if (!(options->std >= 0) || isinf(options->std) || !isfinite(options->mean) ||
        (options->std == 0 && options->mean != 0))
        return td_fail(TD_ERR_INVALID,
                       "%s: the mean is %g and the standard deviation %g; both must be finite, "
                       "and the latter above 0",
                       call, options->mean, options->std);
    return TD_OK;
}

td_dataset *td_idx_dataset(const char *images_path, const char *labels_path,
                           const td_idx_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_idx_options none = {0};
    options = options ? options : &none;
    if (check_options("td_idx_dataset", options))
        return NULL;
    if (!images_path) {
        td_fail(TD_ERR_INVALID, "td_idx_dataset: the path of the images is NULL");
        return NULL;
    }
    struct idx_dataset *self = calloc(1, sizeof *self);
    if (!self) {
        td__fail_nomem("td_idx_dataset");
        return NULL;
    }
    self->raw = options->pixels == TD_PIXELS_RAW;
    make_pixels(self, options);
    td_dataset *dataset = NULL;
    td_status status = read_files(self, images_path, labels_path);
    if (status)
        td_fail(status, "td_idx_dataset: %s", td__error_text());
    else
        dataset = td_dataset_create(&idx_dataset_ops, self);
    if (!dataset)
        destroy(self);
    return dataset;
}

/* ---- Fashion-MNIST --------------------------------------------------------------------------- */

/* Finds `name`, with ".gz" or without, in the directory `base`/`below`. */
static bool find_file(char *path, size_t capacity, const char *base, const char *below,
                      const char *name)
{
    static const char *const suffixes[] = {".gz", ""};
    for (int i = 0; i < 2; i++) {
        int length = snprintf(path, capacity, "%s/%s/%s%s", base, below, name, suffixes[i]);
        if (length > 0 && (size_t)length < capacity && access(path, F_OK) == 0)
            return true;
    }
    return false;
}

static td_status find_fashion(char *path, size_t capacity, const char *directory, const char *name)
{
    const char *data = getenv("TANDEM_DATA");
    if (directory) {
        if (find_file(path, capacity, directory, ".", name))
            return TD_OK;
    } else if (data && *data) {
        if (find_file(path, capacity, data, FASHION_MNIST, name) ||
            find_file(path, capacity, data, ".", name))
            return TD_OK;
        directory = data;
    } else {
        if (find_file(path, capacity, DEBIAN_DATASETS, FASHION_MNIST, name))
            return TD_OK;
        directory = DEBIAN_DATASETS "/" FASHION_MNIST;
    }
    return td_fail(
        TD_ERR_SYSTEM,
        "td_fashion_mnist: there is no %s.gz in %s; install Debian's package "
        "dataset-fashion-mnist (apt install dataset-fashion-mnist), or name the directory "
        "that has it by TANDEM_DATA or in the options",
        name, directory);
}

td_dataset *td_fashion_mnist(td_dataset_part part, const td_idx_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_idx_options chosen = options ? *options : (td_idx_options){0};
    if (check_options("td_fashion_mnist", &chosen))
        return NULL;
    if (part != TD_TRAIN && part != TD_TEST) {
        td_fail(TD_ERR_INVALID, "td_fashion_mnist: %d is neither TD_TRAIN nor TD_TEST", (int)part);
        return NULL;
    }
    if (chosen.std == 0) {
        chosen.mean = 0.2860;
        chosen.std = 0.3530;
    }
    char images[4096], labels[4096];
    bool train = part == TD_TRAIN;
    if (find_fashion(images, sizeof images, chosen.directory,
                     train ? "train-images-idx3-ubyte" : "t10k-images-idx3-ubyte") ||
        find_fashion(labels, sizeof labels, chosen.directory,
                     train ? "train-labels-idx1-ubyte" : "t10k-labels-idx1-ubyte"))
        return NULL;
    return td_idx_dataset(images, labels, &chosen);
}
