// A C++ user of the installed library: trains a small network, with the macros of the headers.
#include <tandem/tandem.h>

#include <cmath>
#include <cstdio>

namespace
{

enum { SAMPLES = 64, INPUTS = 4, STEPS = 40 };

int fail(const char *what)
{
    std::fprintf(stderr, "train: %s: %s\n", what, td_last_error());
    return 1;
}

// Each row of x is four numbers, and its class the sign of their sum.
td_dataset *make_data()
{
    TD_SCOPE;
    td_tensor *x = td_randn(TD_SHAPE(SAMPLES, INPUTS), TD_F32, NULL);
    td_tensor *sum = td_sum_dims(x, TD_DIMS(1), false);
    return td_tensor_dataset(x, td_to_dtype(td_gt_scalar(sum, 0), TD_I64));
}

// The mean of the losses of an epoch; a NaN where a call failed.
double train(td_module *net, td_optimizer *sgd, td_loader *loader)
{
    double sum = 0;
    for (td_batch batch; td_loader_next(loader, &batch);) {
        TD_SCOPE;
        if (batch.size != 16)
            continue; // goes on with the loop: the scope is no loop of its own
        td_optimizer_zero_grad(sgd);
        td_tensor *loss = td_cross_entropy(td_forward(net, batch.input), batch.target);
        if (td_backward(loss) || td_optimizer_step(sgd))
            return NAN;
        sum += td_item(loss);
    }
    return td_loader_status(loader) ? NAN : sum / (double)td_loader_batches(loader);
}

bool check_lists()
{
    TD_SCOPE;
    TD_NO_GRAD;
    const float numbers[] = {1, 2, 3, 4, 5, 6};
    size_t rows = 2; // no int64_t, and no constant
    td_tensor *x = td_from_array(numbers, TD_SHAPE(rows, 3), TD_F32, NULL);
    td_tensor *y = td_cat(TD_TENSORS(x, td_mul_scalar(x, 10)), 0);
    td_tensor *z = td_permute(y, TD_DIMS(1, 0));
    return td_tensor_size(z, 0) == 3 && td_tensor_size(z, 1) == 4 && td_item(td_max(z)) == 60 &&
           td_tensor_numel(td_zeros(TD_SHAPE(), TD_F32, NULL)) == 1 && !td_grad_enabled();
}

// Each C++ type becomes a value of its kind.
bool check_values()
{
    TD_SCOPE;
    size_t rows = 2;
    const char *name = "w";
    char text[] = "mutable";
    td_tensor *x = td_zeros(TD_SHAPE(rows), TD_F32, NULL);
    td_value *args = TD_ARGS(true, 'a', rows, -1, 0.5f, 2.5, "literal", name, text, x, TD_ARGS(1));
    td_value *map = td_value_set(td_value_map(), "args", args);
    const td_value_kind kinds[] = {TD_VALUE_BOOL,  TD_VALUE_INT,    TD_VALUE_INT,  TD_VALUE_INT,
                                   TD_VALUE_FLOAT, TD_VALUE_FLOAT,  TD_VALUE_TEXT, TD_VALUE_TEXT,
                                   TD_VALUE_TEXT,  TD_VALUE_TENSOR, TD_VALUE_LIST};
    bool same = td_value_count(args) == sizeof kinds / sizeof kinds[0];
    for (int i = 0; same && i < td_value_count(args); i++)
        same = td_value_kind_of(td_value_at(args, i)) == kinds[i];
    int64_t minus_one = 0;
    return same && !td_value_int(td_value_at(args, 3), &minus_one) && minus_one == -1 &&
           td_value_get(map, "args") == args && td_value_of(map) == map &&
           td_value_count(td_value_list(TD_VALUES(td_value_of(1), map))) == 2 &&
           td_value_count(TD_NO_ARGS) == 0;
}

} // namespace

int main()
{
    td_manual_seed(1);
    if (!check_lists())
        return fail("lists");
    if (!check_values())
        return fail("values");
    td_dataset *data = make_data();
    td_loader_options batches = {};
    batches.batch_size = 16;
    batches.shuffle = true;
    td_loader *loader = td_loader_create(data, &batches);

    td_module *net = td_sequential(td_linear(INPUTS, 8), td_relu(), td_linear(8, 2), nullptr);
    td_module *list = td_module_list(td_relu(), td_tanh(), NULL);
    td_sgd_options rate = {};
    rate.lr = 0.1;
    rate.momentum = 0.9;
    td_optimizer *sgd = td_sgd(net, &rate);
    if (!loader || !list || !sgd)
        return fail("setup");

    double first = train(net, sgd, loader), last = first;
    for (int step = 1; step < STEPS; step++)
        last = train(net, sgd, loader);
    if (!(last < first / 4))
        return fail("the loss did not go down");
    std::printf("consumer: C++ trained from %.3f to %.3f\n", first, last);

    td_optimizer_destroy(sgd);
    td_module_destroy(list);
    td_module_destroy(net);
    td_loader_destroy(loader);
    td_dataset_release(data);
    return 0;
}
