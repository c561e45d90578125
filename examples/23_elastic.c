/* Training that goes on when processes die: kill -9 any of them: the others compute its part, and tdrun
 * starts another one, which gets the state from them (with --on-failure shrink it does not).
 *
 *     tdrun --standalone --nproc-per-node=4 --on-failure replace ./23_elastic [steps] [model.safetensors [record]]
 *
 * A small convolutional network learns Fashion-MNIST. The weights at the end are the same ones, to the bit, whoever was killed
 * and whenever: compare the files of two runs with sha256sum. The record says which rank has computed which samples. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

static td_module *make_net(void)
{
    td_manual_seed(1);
    return td_sequential(td_conv2d(1, 10, 5), td_max_pool2d(2), td_relu(), td_conv2d(10, 20, 5),
                         td_max_pool2d(2), td_relu(), td_flatten(), td_linear(320, 50), td_relu(),
                         td_dropout(0.3), td_linear(50, 10), td_log_softmax(1), NULL);
}

/* One slice of a step: which rank computes it makes no difference. */
static td_status slice(td_elastic_slice *slice, void *arg)
{
    (void)arg;
    td_tensor *loss = td_nll_loss(td_forward(slice->model, slice->batch.input),
                                  slice->batch.target);
    slice->loss = td_item(loss);
    return td_backward(loss);
}

static void tell(const td_elastic_event *event, void *arg)
{
    td_elastic *elastic = *(td_elastic **)arg;
    if (!elastic || td_elastic_rank(elastic) != 0)
        return;
    if (event->kind == TD_ELASTIC_DIED)
        printf("step %4d  %s\n", (int)event->step, event->text);
    if (event->kind == TD_ELASTIC_RECOVERED)
        printf("step %4d  %d ranks go on after %.1f ms\n", (int)event->step, event->ranks,
               event->ms);
    if (event->kind == TD_ELASTIC_JOINED)
        printf("step %4d  rank %d has joined\n", (int)event->step, event->rank);
    if (event->kind == TD_ELASTIC_COMMITTED && event->step % 20 == 0)
        printf("step %4d  %d ranks  loss %.4f\n", (int)event->step, event->ranks, event->loss);
}

static td_status train(int64_t steps, const char *path, const char *record)
{
    td_elastic *elastic = NULL;
    td_dataset *data = td_fashion_mnist(TD_TRAIN, NULL);
    td_module *net = make_net();
    td_optimizer *sgd = td_sgd(net, &(td_sgd_options){.lr = 0.02, .momentum = 0.9});
    if (data && sgd)
        elastic = td_elastic_create(&(td_elastic_options){
            .training = {.model = net, .optimizer = sgd},
            .dataset = data,
            .slices = 8,
            .slice_size = 32,
            .check_every = 50,
            .audit = record,
            .on_event = tell,
            .event_arg = &elastic,
        });
    td_status status = elastic ? td_elastic_run(elastic, steps, slice, NULL) : td_last_status();
    if (!status && !td_elastic_stopped(elastic) && td_elastic_rank(elastic) == 0)
        status = td_save_module(path, td_elastic_model(elastic));
    td_elastic_destroy(elastic); /* with the network */
    td_optimizer_destroy(sgd);
    td_dataset_release(data);
    return status;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0); /* a killed process does not flush its buffer */
    td_status status = td_init_process_group(NULL);
    if (!status)
        status = train(argc > 1 ? atoi(argv[1]) : 300, argc > 2 ? argv[2] : "elastic.safetensors",
                       argc > 3 ? argv[3] : NULL);
    if (!status)
        status = td_destroy_process_group();
    if (status)
        fprintf(stderr, "23_elastic: %s\n", td_last_error());
    return status != TD_OK;
}
