/* Files of torch.save(): recorded ones, views, names, what is refused, and damaged ones. */
#include "checkpoint/unpickle.h"
#include "runner.h"

#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *recorded(const char *name)
{
    static char path[2][512];
    static int next;
    char *text = path[next++ % 2];
    snprintf(text, sizeof path[0], TD_TORCH_DIR "/%s.pt", name);
    return text;
}

static td_state *load(const char *name)
{
    td_state *state = td_load_torch(recorded(name), NULL);
    if (!state)
        FAIL("%s: %s", name, td_last_error());
    return state;
}

/* The elements of a tensor as f64. */
static void check_values(const td_state *state, const char *name, const double *values, int count)
{
    TD_SCOPE;
    td_tensor *tensor = td_state_get(state, name);
    if (!tensor)
        FAIL("there is no \"%s\"", name);
    CHECK_EQ(td_tensor_numel(tensor), count);
    td_tensor *flat = td_f_flatten(td_to_dtype(tensor, TD_F64), 0, -1);
    for (int i = 0; i < count; i++)
        if (td_item(td_select(flat, 0, i)) != values[i])
            FAIL("%s[%d] is %g, not %g", name, i, td_item(td_select(flat, 0, i)), values[i]);
}

#define VALUES(...) (const double[]){__VA_ARGS__}, sizeof(double[]){__VA_ARGS__} / sizeof(double)

/* ---- What is read ------------------------------------------------------------------------------------- */

TEST(a_module_of_pytorch)
{
    static const char *const names[] = {"0.weight",
                                        "0.bias",
                                        "1.weight",
                                        "1.bias",
                                        "1.running_mean",
                                        "1.running_var",
                                        "1.num_batches_tracked",
                                        "2.weight",
                                        "2.bias"};
    td_state *state = load("module");
    CHECK_EQ(td_state_count(state), 9);
    for (int i = 0; i < 9; i++)
        CHECK_STR(td_state_name(state, i), names[i]);
    CHECK_EQ(td_tensor_ndim(td_state_get(state, "0.weight")), 4);
    CHECK_EQ(td_tensor_dtype(td_state_get(state, "1.num_batches_tracked")), TD_I64);
    check_values(state, "0.bias", VALUES(100, 101));
    check_values(state, "2.bias", VALUES(800, 801, 802));
    td_state_destroy(state);

    /* Straight into a module, also a wrapped one. */
    td_module *net = td_sequential(td_conv2d(1, 2, 3), td_batch_norm2d(2), td_linear(4, 3), NULL);
    CHECK_OK(td_load_module(recorded("module"), net, NULL));
    td_state *loaded = td_module_state(net);
    check_values(loaded, "2.bias", VALUES(800, 801, 802));
    td_state_destroy(loaded);
    td_module_destroy(net);
    net = td_linear(4, 3);
    CHECK_FAILS(td_load_module(recorded("module"), net, NULL), TD_ERR_INVALID, "module.pt");
    td_module_destroy(net);
}

TEST(all_dtypes)
{
    td_state *state = load("dtypes");
    CHECK_EQ(td_state_count(state), 12);
    for (int i = 0; i < td_state_count(state); i++) {
        td_dtype dtype;
        const char *name = td_state_name(state, i);
        CHECK(td_dtype_parse(name, &dtype));
        CHECK_EQ(td_tensor_dtype(td_state_tensor(state, i)), dtype);
        if (dtype == TD_BOOL)
            check_values(state, name, VALUES(1, 1, 0, 1, 1, 1));
        else if (dtype != TD_U8) /* -2 wraps around */
            check_values(state, name, VALUES(-2, -1, 0, 1, 2, 3));
    }
    td_state_destroy(state);
}

TEST(views_of_one_storage)
{
    td_state *state = load("views");
    check_values(state, "row", VALUES(4, 5, 6, 7, 8, 9));
    check_values(state, "columns", VALUES(-1, 0, 1, 5, 6, 7, 11, 12, 13, 17, 18, 19));
    check_values(state, "every_second", VALUES(-2, 1, 10, 13));
    check_values(state, "expanded", VALUES(7, 7, 7, 7, 7, 7));
    check_values(state, "scalar", VALUES(5));
    td_tensor *transposed = td_state_get(state, "transposed");
    CHECK_EQ(td_tensor_size(transposed, 0), 6);
    CHECK_EQ(td_tensor_ndim(td_state_get(state, "scalar")), 0);
    CHECK_EQ(td_tensor_size(td_state_get(state, "empty"), 1), 3);
    {
        TD_SCOPE;
        CHECK(td_item(td_select(td_select(transposed, 0, 2), 0, 3)) == 18);
    }
    td_state_destroy(state);
}

static void collect(const char *key, const char *value, void *arg)
{
    char line[128];
    snprintf(line, sizeof line, "%s=%s ", key, value);
    strcat(arg, line);
}

TEST(a_checkpoint_of_many_kinds_of_values)
{
    td_state *state = load("checkpoint");
    int64_t number;
    double real;
    CHECK_OK(td_state_get_integer(state, "epoch", &number));
    CHECK_EQ(number, 3);
    CHECK_OK(td_state_get_integer(state, "large", &number));
    CHECK_EQ(number, (int64_t)1 << 40);
    CHECK_OK(td_state_get_integer(state, "negative", &number));
    CHECK_EQ(number, -70000);
    CHECK_OK(td_state_get_integer(state, "done", &number));
    CHECK_EQ(number, 0);
    CHECK_OK(td_state_get_number(state, "betas.1", &real));
    CHECK(real == 0.999);
    CHECK_OK(td_state_get_integer(state, "size.1", &number));
    CHECK_EQ(number, 3);
    check_values(state, "nested.a.b.5", VALUES(1, 1));
    check_values(state, "parameter", VALUES(3, 3));
    CHECK_OK(td_state_get_number(state, "optimizer.param_groups.0.momentum", &real));
    CHECK(real == 0.9);
    CHECK(td_state_get(state, "optimizer.state.4.momentum_buffer") != NULL);
    CHECK(td_state_get(state, "name") == NULL);
    td_state *part = td_state_part(state, "losses.");
    CHECK_EQ(td_state_count(part), 2);
    td_state_destroy(part);
    td_state_destroy(state);

    char notes[2048] = "";
    CHECK_OK(td_read_torch_notes(recorded("checkpoint"), collect, notes));
    CHECK_CONTAINS(notes, "name=a net ");
    CHECK_CONTAINS(notes, "nothing=None ");
    CHECK_CONTAINS(notes, "dtype=torch.float16 ");
    CHECK_CONTAINS(notes, "device=cuda:1 ");
}

TEST(other_protocols_and_single_tensors)
{
    td_state *state = load("protocol4");
    check_values(state, "x", VALUES(-2, -1, 0));
    td_state_destroy(state);
    state = load("tensor");
    check_values(state, "value", VALUES(-2, -1, 0));
    td_state_destroy(state);
}

/* ---- What is refused ------------------------------------------------------------------------------------ */

static void check_refused(const char *path, td_status status, const char *part)
{
    td_state *state = td_load_torch(path, NULL);
    if (state)
        FAIL("%s was read", path);
    CHECK_EQ(td_last_status(), status);
    CHECK_CONTAINS(td_last_error(), part);
}

TEST(other_formats)
{
    check_refused(recorded("legacy"), TD_ERR_UNSUPPORTED, "before 1.6");
    check_refused(recorded("whole_module"), TD_ERR_UNSUPPORTED,
                  "\"torch.nn.modules.activation.ReLU\"");
    check_refused(recorded("script"), TD_ERR_UNSUPPORTED, "TorchScript");
    check_refused(recorded("no_such"), TD_ERR_SYSTEM, "cannot be read");
    check_refused("/", TD_ERR_SYSTEM, "a directory");
    check_refused("/dev/null", TD_ERR_SYSTEM, "no regular file");
    CHECK(!td_load_torch(NULL, NULL));
    CHECK_FAILS(td_read_torch_notes("x", NULL, NULL), TD_ERR_INVALID, "NULL");
    td_map_location both = {.device = td_device_get("cpu"), .as_saved = true};
    CHECK(!td_load_torch(recorded("module"), &both));
}

static size_t read_recorded(const char *name, char **data)
{
    FILE *file = fopen(recorded(name), "rb");
    CHECK(file != NULL);
    *data = malloc(1 << 16);
    size_t size = fread(*data, 1, 1 << 16, file);
    CHECK(size > 0 && size < 1 << 16);
    fclose(file);
    return size;
}

static const char *write_file(const void *data, size_t size)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/damaged.pt", td_test_temp_dir());
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(data, 1, size, file) == size && fclose(file) == 0);
    return path;
}

TEST(every_cut_and_every_flipped_byte)
{
    char *data;
    size_t size = read_recorded("views", &data);
    for (size_t cut = 0; cut < size; cut += 7) {
        const char *path = write_file(data, cut);
        CHECK(td_load_torch(path, NULL) == NULL);
        CHECK_CONTAINS(td_last_error(), path);
    }
    int read = 0;
    for (size_t i = 0; i < size; i++) {
        data[i] ^= 0x41;
        td_state *state = td_load_torch(write_file(data, size), NULL);
        if (!state)
            CHECK_CONTAINS(td_last_error(), "damaged.pt");
        read += state != NULL;
        td_state_destroy(state);
        data[i] ^= 0x41;
    }
    /* Padding, dates and the like do not count; data and the pickle are behind checksums. */
    CHECK(read > 0 && read < (int)size);
    free(data);
}

TEST(elements_that_were_changed)
{
    char *data;
    size_t size = read_recorded("tensor", &data);
    int64_t first = -2;
    char *at = memmem(data, size, &first, sizeof first);
    CHECK(at != NULL);
    at[0] ^= 1;
    check_refused(write_file(data, size), TD_ERR_INVALID, "checksum");
    free(data);
}

/* ---- Pickles -------------------------------------------------------------------------------------------------- */

static void check_pickle(const void *data, size_t size, td_status status, const char *part)
{
    struct td__pickle pickle;
    CHECK_FAILS(td__unpickle("x.pt", data, size, &pickle), status, part);
    CHECK(!pickle.all);
}

#define PICKLE(text) text, sizeof text - 1

TEST(pickles_of_strangers)
{
    check_pickle(PICKLE("\x80\x02"
                        "cos\nsystem\nX\x02\0\0\0ls\x85R."),
                 TD_ERR_UNSUPPORTED, "\"os.system\"");
    check_pickle(PICKLE("\x80\x04\x8c\x05posix\x8c\x06system\x93."), TD_ERR_UNSUPPORTED,
                 "\"posix.system\"");
    check_pickle(PICKLE("\x80\x02"
                        "cbuiltins\neval\n."),
                 TD_ERR_UNSUPPORTED, "\"builtins.eval\"");
    check_pickle(PICKLE(""), TD_ERR_INVALID, "cut off");
    check_pickle(PICKLE("."), TD_ERR_INVALID, "without one result");
    check_pickle(PICKLE("(."), TD_ERR_INVALID, "without one result");
    check_pickle(PICKLE("N"), TD_ERR_INVALID, "cut off");
    check_pickle(PICKLE("X\xff\xff\xff\xff."), TD_ERR_INVALID, "cut off");
    check_pickle(PICKLE("\x8d\xff\xff\xff\xff\xff\xff\xff\xff."), TD_ERR_INVALID, "");
    check_pickle(PICKLE("Nr\xff\xff\xff\xff."), TD_ERR_INVALID, "memo");
    check_pickle(PICKLE("h\x05."), TD_ERR_INVALID, "not there");
    check_pickle(PICKLE("(t(0000."), TD_ERR_INVALID, "empty");
    check_pickle(PICKLE("Na."), TD_ERR_INVALID, "missing");
    check_pickle(PICKLE("NNa."), TD_ERR_INVALID, "no list");
    check_pickle(PICKLE("}(Nu."), TD_ERR_INVALID, "no list or dictionary");
    check_pickle(PICKLE("\x8a\x09"
                        "123456789."),
                 TD_ERR_UNSUPPORTED, "64 bits");
    check_pickle(PICKLE("N)R."), TD_ERR_INVALID, "no function");
    check_pickle(PICKLE("ctorch\nfloat32\n)R."), TD_ERR_INVALID, "no function");
    check_pickle(PICKLE("ctorch\nSize\n)R."), TD_ERR_INVALID, "arguments");
    check_pickle(PICKLE("N}b."), TD_ERR_UNSUPPORTED, "attributes");
    check_pickle(PICKLE("NQ."), TD_ERR_INVALID, "storage");
    check_pickle(PICKLE("I1\n."), TD_ERR_UNSUPPORTED, "0x49");
    check_pickle(PICKLE("X\x02\0\0\0a\0."), TD_ERR_INVALID, "byte of 0");
}

TEST(numbers_of_all_widths)
{
    struct td__pickle pickle;
    static const char data[] = "\x80\x02(K\xffM\xff\xffJ\xff\xff\xff\xff\x8a\x01\xff\x8a\x00"
                               "\x8a\x08\0\0\0\0\0\0\0\x80G\xbf\xf0\0\0\0\0\0\0\x88\x89t.";
    static const int64_t numbers[] = {255, 65535, -1, -1, 0, INT64_MIN};
    CHECK_OK(td__unpickle("x.pt", data, sizeof data - 1, &pickle));
    CHECK_EQ(pickle.root->as.list.count, 9);
    struct td__pickle_value **items = pickle.root->as.list.items;
    for (int i = 0; i < 6; i++)
        CHECK_EQ(items[i]->as.number, numbers[i]);
    CHECK(items[6]->as.real == -1);
    CHECK(items[7]->kind == TD__PICKLE_BOOL && items[7]->as.number && !items[8]->as.number);
    td__pickle_free(&pickle);
}

/* A storage of 4 f32, and a tensor of it with the given offset, shape and strides. */
#define STORAGE "(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0000X\3\0\0\0cpuK\4tQ"

TEST(tensors_outside_of_their_storage)
{
    check_pickle(PICKLE("ctorch._utils\n_rebuild_tensor_v2\n(" STORAGE "K\0K\5\x85K\1\x85\x89NtR."),
                 TD_ERR_INVALID, "more elements");
    check_pickle(PICKLE("ctorch._utils\n_rebuild_tensor_v2\n(" STORAGE "K\1K\4\x85K\1\x85\x89NtR."),
                 TD_ERR_INVALID, "more elements");
    check_pickle(PICKLE("ctorch._utils\n_rebuild_tensor_v2\n(" STORAGE
                        "K\0J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86K\0K\0\x86\x89NtR."),
                 TD_ERR_INVALID, "more elements");
    check_pickle(PICKLE("ctorch._utils\n_rebuild_tensor_v2\n(" STORAGE
                        "K\0J\xff\xff\xff\xff\x85K\1\x85\x89NtR."),
                 TD_ERR_INVALID, "valid shape");
    check_pickle(
        PICKLE("ctorch._utils\n_rebuild_tensor_v2\n(" STORAGE "K\0K\2\x85K\1K\1\x86\x89NtR."),
        TD_ERR_INVALID, "valid shape");
    check_pickle(PICKLE("ctorch._utils\n_rebuild_tensor_v2\n(K\0K\0K\2\x85K\1\x85\x89NtR."),
                 TD_ERR_INVALID, "lacks its storage");
}

TEST(a_dtype_beside_its_bytes)
{
    struct td__pickle pickle;
    static const char plain[] =
        "ctorch._utils\n_rebuild_tensor_v3\n((X\7\0\0\0storagectorch.storage\n"
        "UntypedStorage\nX\1\0\0\0000X\3\0\0\0cpuK\x10tQK\0K\2\x85K\1\x85\x89N"
        "ctorch\nuint64\ntR.";
    CHECK_OK(td__unpickle("x.pt", plain, sizeof plain - 1, &pickle));
    CHECK_EQ(pickle.root->kind, TD__PICKLE_TENSOR);
    CHECK_EQ(pickle.root->as.tensor.dtype, TD_U64);
    td__pickle_free(&pickle);
}
