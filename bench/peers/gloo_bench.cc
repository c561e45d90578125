// Gloo's own C++ interface (without torch) over TCP on loopback, as JSON lines of rank 0.
//
//     gloo_bench RANKS ALGORITHM OPERATIONS SIZES SECONDS
//
// starts the ranks itself; where GLOO_BENCH_RANKS is set, only those that it names (a list with commas), which meet
// those of other calls in GLOO_BENCH_DIRECTORY. The interface is GLOO_SOCKET_IFNAME, or lo.
//
// ALGORITHM is that of all_reduce: ring, bcube or hd (halving and doubling, of Gloo's older
// interface). OPERATIONS and SIZES are lists with commas; Gloo has no reduce_scatter here, and that
// one is passed over. The same method as mpi_bench.c.
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/alltoall.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/gather.h>
#include <gloo/math.h>
#include <gloo/reduce.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/scatter.h>
#include <gloo/transport/tcp/device.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int kWarmup = 3, kMinIterations = 5, kMaxIterations = 1000;
using Call = std::function<void()>;
using Context = std::shared_ptr<gloo::rendezvous::Context>;

struct Plan {
    int ranks;
    std::string algorithm;
    std::vector<std::string> operations;
    std::vector<size_t> sizes;
    double seconds;
};

double Now()
{
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

void Barrier(const Context &context)
{
    gloo::BarrierOptions options(context);
    gloo::barrier(options);
}

void SumFloats(void *to, const void *a, const void *b, size_t n)
{
    gloo::sum<float>(to, a, b, n);
}

void MaxDoubles(void *to, const void *a, const void *b, size_t n)
{
    gloo::max<double>(to, a, b, n);
}

void Maximum(const Context &context, double *values, size_t count)
{
    gloo::AllreduceOptions options(context);
    options.setOutput(values, count);
    options.setReduceFunction(MaxDoubles);
    gloo::allreduce(options);
}

bool HasParts(const std::string &op)
{
    return op == "all_gather" || op == "all_to_all" || op == "gather" || op == "scatter";
}

double BusFactor(const std::string &op, double ranks)
{
    if (op == "barrier")
        return 0;
    if (op == "all_reduce")
        return 2 * (ranks - 1) / ranks;
    return HasParts(op) ? (ranks - 1) / ranks : 1;
}

Call MakeAllReduce(const Context &c, const std::string &algorithm, float *out, size_t n)
{
    if (algorithm == "hd") {
        auto object = std::make_shared<gloo::AllreduceHalvingDoubling<float>>(
            c, std::vector<float *>{out}, static_cast<int>(n));
        return [=] { object->run(); };
    }
    auto chosen = algorithm == "bcube" ? gloo::AllreduceOptions::Algorithm::BCUBE
                                       : gloo::AllreduceOptions::Algorithm::RING;
    return [=] {
        gloo::AllreduceOptions options(c);
        options.setAlgorithm(chosen);
        options.setOutput(out, n);
        options.setReduceFunction(SumFloats);
        gloo::allreduce(options);
    };
}

Call MakeRoundTrip(const Context &c, float *in, float *out, size_t bytes)
{
    std::shared_ptr<gloo::transport::UnboundBuffer> sent = c->createUnboundBuffer(in, bytes),
                                                    got = c->createUnboundBuffer(out, bytes);
    return [=] {
        int other = 1 - c->rank;
        if (c->rank > 1)
            return;
        if (c->rank == 0) {
            sent->send(other, 7);
            sent->waitSend();
        }
        got->recv(other, 7);
        got->waitRecv();
        if (c->rank == 1) {
            sent->send(other, 7);
            sent->waitSend();
        }
    };
}

// Operations of which only some ranks have all the data.
Call MakeRooted(const Context &c, const std::string &op, float *in, float *out, size_t n)
{
    size_t part = n / c->size;
    if (op == "broadcast")
        return [=] {
            gloo::BroadcastOptions options(c);
            options.setOutput(out, n);
            options.setRoot(0);
            gloo::broadcast(options);
        };
    if (op == "reduce")
        return [=] {
            gloo::ReduceOptions options(c);
            options.setInput(in, n);
            options.setOutput(out, n);
            options.setRoot(0);
            options.setReduceFunction(SumFloats);
            gloo::reduce(options);
        };
    if (op == "gather")
        return [=] {
            gloo::GatherOptions options(c);
            options.setInput(in, part);
            if (c->rank == 0)
                options.setOutput(out, n);
            options.setRoot(0);
            gloo::gather(options);
        };
    return [=] {
        gloo::ScatterOptions options(c);
        std::vector<float *> parts;
        for (int i = 0; i < c->size; i++)
            parts.push_back(in + part * i);
        if (c->rank == 0)
            options.setInputs(parts, part);
        options.setOutput(out, part);
        options.setRoot(0);
        gloo::scatter(options);
    };
}

// A call of `op`; an empty function for one that is not there.
Call Make(const Context &c, const std::string &op, const std::string &algorithm, float *in,
          float *out, size_t bytes)
{
    size_t n = bytes / sizeof(float), part = n / c->size;
    if (op == "barrier")
        return [=] { Barrier(c); };
    if (op == "all_reduce")
        return MakeAllReduce(c, algorithm, out, n);
    if (op == "sendrecv")
        return MakeRoundTrip(c, in, out, bytes);
    if (op == "all_gather")
        return [=] {
            gloo::AllgatherOptions options(c);
            options.setInput(in, part);
            options.setOutput(out, n);
            gloo::allgather(options);
        };
    if (op == "all_to_all")
        return [=] {
            gloo::AlltoallOptions options(c);
            options.setInput(in, n);
            options.setOutput(out, n);
            gloo::alltoall(options);
        };
    if (op == "broadcast" || op == "reduce" || op == "gather" || op == "scatter")
        return MakeRooted(c, op, in, out, n);
    return nullptr;
}

double Once(const Context &context, const Call &call)
{
    Barrier(context);
    double start = Now();
    call();
    return Now() - start;
}

void Measure(const Context &context, const Plan &plan, const std::string &op, size_t bytes,
             const Call &call)
{
    double fastest = 1e9, share = op == "sendrecv" ? 0.5 : 1;
    for (int i = 0; i < kWarmup; i++)
        fastest = std::min(fastest, Once(context, call));
    Maximum(context, &fastest, 1);
    double wanted = std::min<double>(plan.seconds / (fastest + 1e-9), kMaxIterations);
    std::vector<double> times(std::max(kMinIterations, static_cast<int>(wanted)));
    for (double &time : times)
        time = Once(context, call);
    Maximum(context, times.data(), times.size());
    if (context->rank)
        return;
    std::sort(times.begin(), times.end());
    double median = times[times.size() / 2] * share;
    printf("{\"peer\":\"gloo-%s\",\"op\":\"%s\",\"ranks\":%d,\"bytes\":%zu,\"iters\":%zu,"
           "\"median_us\":%.3f,\"min_us\":%.3f,\"busbw_GBps\":%.4f}\n",
           plan.algorithm.c_str(), op.c_str(), plan.ranks, bytes, times.size(), median * 1e6,
           times[0] * share * 1e6, bytes / median * BusFactor(op, plan.ranks) / 1e9);
    fflush(stdout);
}

void CheckSum(const Context &context, const Plan &plan, std::vector<float> *out)
{
    const size_t count = 1024;
    std::fill(out->begin(), out->begin() + count, 1.f);
    Make(context, "all_reduce", plan.algorithm, nullptr, out->data(), count * sizeof(float))();
    if ((*out)[0] != plan.ranks || (*out)[count - 1] != plan.ranks) {
        fprintf(stderr, "gloo_bench: a sum is wrong\n");
        _exit(1);
    }
    std::fill(out->begin(), out->end(), 0.f);
}

void Work(int rank, const Plan &plan, const std::string &directory)
{
    gloo::transport::tcp::attr attributes;
    const char *interface = getenv("GLOO_SOCKET_IFNAME");
    attributes.iface = interface ? interface : "lo";
    auto device = gloo::transport::tcp::CreateDevice(attributes);
    gloo::rendezvous::FileStore store(directory);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, plan.ranks);
    context->connectFullMesh(store, device);
    size_t most = std::max<size_t>(4096, *std::max_element(plan.sizes.begin(), plan.sizes.end()));
    std::vector<float> in(most / sizeof(float)), out(in.size());
    CheckSum(context, plan, &out);
    for (const auto &op : plan.operations) {
        for (size_t bytes : plan.sizes) {
            if (op == "barrier")
                bytes = 0;
            if (HasParts(op))
                bytes = std::max(bytes, sizeof(float) * plan.ranks);
            // Halving and doubling needs at least one element for each step.
            if (plan.algorithm == "hd" && bytes < 1024)
                continue;
            Call call = Make(context, op, plan.algorithm, in.data(), out.data(), bytes);
            if (call)
                Measure(context, plan, op, bytes, call);
            if (!bytes)
                break;
        }
    }
    Barrier(context);
}

std::vector<std::string> Split(const char *text)
{
    std::vector<std::string> words;
    std::istringstream stream(text);
    for (std::string word; std::getline(stream, word, ',');)
        words.push_back(word);
    return words;
}

}  // namespace

int main(int argc, char **argv)
{
    if (argc != 6) {
        fprintf(stderr, "usage: gloo_bench RANKS ring|bcube|hd OPERATIONS SIZES SECONDS\n");
        return 2;
    }
    Plan plan{atoi(argv[1]), argv[2], Split(argv[3]), {}, atof(argv[5])};
    for (const auto &size : Split(argv[4]))
        plan.sizes.push_back(strtoull(size.c_str(), nullptr, 10));
    const char *some = getenv("GLOO_BENCH_RANKS"), *shared = getenv("GLOO_BENCH_DIRECTORY");
    const char *temporary = getenv("TMPDIR");
    std::vector<int> ranks;
    for (const auto &rank : Split(some ? some : ""))
        ranks.push_back(atoi(rank.c_str()));
    for (int rank = 0; !some && rank < plan.ranks; rank++)
        ranks.push_back(rank);
    std::string directory = std::string(temporary ? temporary : P_tmpdir) + "/gloo_bench.XXXXXX";
    if (some && shared)
        directory = shared;
    if ((!some && !mkdtemp(&directory[0])) || plan.ranks < 1 || plan.sizes.empty())
        return 2;
    for (int rank : ranks)
        if (fork() == 0) {
            Work(rank, plan, directory);
            _exit(0);
        }
    int bad = 0;
    for (int status; wait(&status) > 0;)
        bad |= status;
    if (some)
        return bad ? 1 : 0;
    std::string remove = "rm -rf '" + directory + "'";
    return bad || system(remove.c_str()) ? 1 : 0;
}
