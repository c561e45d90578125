/* A training loop in plain C arrays, without tensors: td_reducer collects its gradients in buckets, and
 * averages a bucket over all ranks while the loop computes the next one.
 *
 *     $ tdrun --standalone --nproc-per-node=2 ./14_reducer
 *     rank 0: loss 1.2… to 0.0…
 *
 * The five lines are marked. The model is y = w2 tanh(w1 x), and learns the sine of a sum. */
#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { INPUTS = 2, HIDDEN = 16, BATCH = 32, STEPS = 300 };

static void check(bool good)
{
    if (good)
        return;
    fprintf(stderr, "14_reducer: %s\n", td_last_error());
    exit(1);
}

static float number(void) /* in -1 … 1 */
{
    return (float)rand() / (float)RAND_MAX * 2 - 1;
}

int main(void)
{
    float w1[HIDDEN][INPUTS], w2[HIDDEN], x[BATCH][INPUTS], hidden[BATCH][HIDDEN], error[BATCH];
    float first = 0, last = 0;
    srand(1);
    for (int h = 0; h < HIDDEN; h++)
        w1[h][0] = number(), w1[h][1] = number(), w2[h] = number();

    check(!td_init_process_group(NULL));
    srand((unsigned)td_get_rank(NULL) +
          100); /* the same weights, but different samples on each rank */
    td_reducer_buffer buffers[] = {{.count = HIDDEN * INPUTS, .dtype = TD_F32},
                                   {.count = HIDDEN, .dtype = TD_F32}};
    td_reducer *reducer = td_reducer_create(buffers, 2, NULL); /* 1 */
    check(reducer);
    float(*grad1)[INPUTS] = td_reducer_data(reducer, 0), *grad2 = td_reducer_data(reducer, 1);

    for (int step = 0; step < STEPS; step++) {
        last = 0;
        for (int b = 0; b < BATCH; b++) { /* forward: the error of each sample */
            x[b][0] = number(), x[b][1] = number();
            error[b] = -sinf(x[b][0] + x[b][1]);
            for (int h = 0; h < HIDDEN; h++) {
                hidden[b][h] = tanhf(w1[h][0] * x[b][0] + w1[h][1] * x[b][1]);
                error[b] += w2[h] * hidden[b][h];
            }
            last += error[b] * error[b] / BATCH;
        }
        first = step == 0 ? last : first;
        for (int h = 0; h < HIDDEN; h++) { /* backward, the last layer first */
            grad2[h] = 0;
            for (int b = 0; b < BATCH; b++)
                grad2[h] += 2 * error[b] * hidden[b][h] / BATCH;
        }
        check(!td_reducer_ready(reducer, 1)); /* 2 */
        for (int h = 0; h < HIDDEN; h++) {
            grad1[h][0] = grad1[h][1] = 0;
            for (int b = 0; b < BATCH; b++) {
                float inner = 2 * error[b] * w2[h] * (1 - hidden[b][h] * hidden[b][h]) / BATCH;
                grad1[h][0] += inner * x[b][0], grad1[h][1] += inner * x[b][1];
            }
        }
        check(!td_reducer_ready(reducer, 0));                         /* 3 */
        check(!td_reducer_wait(reducer)); /* both are averages now */ /* 4 */
        for (int h = 0; h < HIDDEN; h++) {
            w1[h][0] -= 0.1F * grad1[h][0], w1[h][1] -= 0.1F * grad1[h][1];
            w2[h] -= 0.1F * grad2[h];
        }
    }
    printf("rank %d: loss %.4f to %.4f, w2[0] %.9g\n", td_get_rank(NULL), (double)first,
           (double)last, (double)w2[0]);
    td_reducer_destroy(reducer); /* 5 */
    check(!td_destroy_process_group());
    return 0;
}
