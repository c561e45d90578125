/* Output of workers, without workers: streams whose other end the test holds. */
#include "launch/stream.h"
#include "runner.h"

#include <unistd.h>

static void start(struct td__stream *stream, uv_loop_t *loop)
{
    *stream = (struct td__stream){.style = TD__STYLE_HIDDEN, .log.fd = -1};
    CHECK_OK(td__stream_start(stream, loop));
}

/* The first one has ended, and the second one has got the number of its descriptor, when the first one is finished. */
TEST(a_descriptor_with_the_number_of_another)
{
    uv_loop_t loop;
    struct td__stream first, second;
    CHECK(!uv_loop_init(&loop));
    start(&first, &loop);
    int number = first.read_end;
    close(first.write_end);
    uv_run(&loop, UV_RUN_NOWAIT);
    CHECK_EQ(first.read_end, -1);

    start(&second, &loop);
    CHECK_EQ(second.read_end, number);
    uv_run(&loop, UV_RUN_NOWAIT);
    td__stream_finish(&first);
    uv_run(&loop, UV_RUN_NOWAIT);
    CHECK_EQ(write(second.write_end, "hello", 5), 5);
    uv_run(&loop, UV_RUN_NOWAIT);
    CHECK_EQ(second.tail.size, 5);
    close(second.write_end);
    uv_run(&loop, UV_RUN_NOWAIT);
    CHECK_EQ(second.read_end, -1);
    td__stream_finish(&second);
    uv_run(&loop, UV_RUN_NOWAIT);
    CHECK(!uv_loop_close(&loop));
}
