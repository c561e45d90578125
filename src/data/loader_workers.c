/* The threads of a loader; see loader.h. */
#include "base/fail.h"
#include "data/loader.h"

#include <stdio.h>
#include <stdlib.h>

td_status td__loader_read(td_loader *loader, const struct td__piece *piece, int64_t *failed)
{
    td_dataset *dataset = loader->dataset;
    char *input = piece->buffer->input->data;
    char *target = piece->buffer->target ? piece->buffer->target->data : NULL;
    for (int64_t at = piece->from, row = piece->row; at < piece->to; at++, row++) {
        td_status status = td_dataset_read(
            dataset, loader->order[at], input ? input + (size_t)row * dataset->input_bytes : NULL,
            target ? target + (size_t)row * dataset->target_bytes : NULL);
        if (status) {
            *failed = at;
            return status;
        }
    }
    return TD_OK;
}

/* The next piece, if there is one; under the lock. */
static bool take_piece(td_loader *loader, struct td__piece *piece)
{
    if (loader->cursor >= loader->limit)
        return false;
    int64_t size = loader->options.batch_size, done = loader->cursor - loader->start;
    int64_t batch = done / size, row = done % size;
    int64_t rows = loader->piece < size - row ? loader->piece : size - row;
    if (rows > loader->limit - loader->cursor)
        rows = loader->limit - loader->cursor;
    *piece = (struct td__piece){.buffer = &loader->buffers[batch % loader->buffer_count],
                                .from = loader->cursor,
                                .to = loader->cursor + rows,
                                .row = row};
    loader->cursor += rows;
    return true;
}

static void *work(void *arg)
{
    td_loader *loader = arg;
    pthread_mutex_lock(&loader->lock);
    while (!loader->stopping) {
        struct td__piece piece;
        if (!take_piece(loader, &piece)) {
            pthread_cond_wait(&loader->work, &loader->lock);
            continue;
        }
        loader->reading++;
        pthread_mutex_unlock(&loader->lock);
        int64_t failed;
        td_status status = td__loader_read(loader, &piece, &failed);
        pthread_mutex_lock(&loader->lock);
        loader->reading--;
        struct td__batch_buffer *buffer = piece.buffer;
        /* Of several failures the first one in the order is reported, whichever thread is first. */
        if (status && (!buffer->status || failed < buffer->failed)) {
            buffer->status = status;
            buffer->failed = failed;
            td__error_save(&buffer->error);
        }
        buffer->left -= piece.to - piece.from;
        if (buffer->left == 0 || loader->reading == 0)
            pthread_cond_signal(&loader->ready);
    }
    pthread_mutex_unlock(&loader->lock);
    return NULL;
}

td_status td__loader_start_workers(td_loader *loader)
{
    int workers = loader->options.workers;
    pthread_mutex_init(&loader->lock, NULL);
    td__cond_init(&loader->work);
    td__cond_init(&loader->ready);
    loader->piece = workers ? (loader->options.batch_size - 1) / workers + 1 : 0;
    loader->threads = calloc((size_t)workers + 1, sizeof *loader->threads);
    if (!loader->threads)
        return td__fail_nomem("td_loader_create");
    for (; loader->thread_count < workers; loader->thread_count++) {
        int error = td__thread_start(&loader->threads[loader->thread_count], "td-loader", work,
                                     loader);
        if (error)
            return td_fail(TD_ERR_SYSTEM, "td_loader_create: worker %d of %d cannot be started: %s",
                           loader->thread_count + 1, workers, td__errno_text(error));
    }
    return TD_OK;
}

void td__loader_stop_workers(td_loader *loader)
{
    /* In a fork there are no threads, and the lock may be held by one of the parent's. */
    if (loader->generation == td__fork_generation()) {
        pthread_mutex_lock(&loader->lock);
        loader->stopping = true;
        pthread_cond_broadcast(&loader->work);
        pthread_mutex_unlock(&loader->lock);
        for (int i = 0; i < loader->thread_count; i++)
            pthread_join(loader->threads[i], NULL);
        pthread_cond_destroy(&loader->work);
        pthread_cond_destroy(&loader->ready);
        pthread_mutex_destroy(&loader->lock);
    }
    free(loader->threads);
}

void td__loader_allow(td_loader *loader, int64_t cursor, int64_t limit)
{
    pthread_mutex_lock(&loader->lock);
    if (cursor >= 0)
        loader->cursor = cursor;
    loader->limit = limit;
    pthread_cond_broadcast(&loader->work);
    pthread_mutex_unlock(&loader->lock);
}

void td__loader_halt(td_loader *loader)
{
    pthread_mutex_lock(&loader->lock);
    loader->limit = loader->cursor;
    while (loader->reading)
        pthread_cond_wait(&loader->ready, &loader->lock);
    pthread_mutex_unlock(&loader->lock);
}

void td__loader_wait(td_loader *loader, struct td__batch_buffer *buffer)
{
    pthread_mutex_lock(&loader->lock);
    while (buffer->left)
        pthread_cond_wait(&loader->ready, &loader->lock);
    pthread_mutex_unlock(&loader->lock);
}
