/* Kernels, graphs and tensor maps over the driver in touch_driver.c; with sanitizers, by test_frontend_touch_driver.py.
 *
 * Usage: touch_cases kernels|graphs|tensors|storm|cost. Exit status 0: all is well; else a line says what is not. */
#include "touch_driver.h"
#include "access.h"
#include "arguments.h"
#include "functions.h"
#include "graph_nodes.h"
#include "graphs.h"
#include "memory.h"
#include "tensor_maps.h"
#include "track.h"

#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static CUmodule module_new(uint64_t number)
{
    CUmodule module = malloc(16);
    phos_functions_module(module, number);
    return module;
}

static CUfunction function_new(CUmodule module, const char *name)
{
    CUfunction function;
    check(serve_cuModuleGetFunction(&function, module, name) == CUDA_SUCCESS, "no function");
    return function;
}

/* A launch as touch_launch.c sees it. Answers what was touched, as text. */
static const char *launched(CUfunction function, uint64_t to, uint64_t from)
{
    static __thread char text[512];
    uint32_t number = 7;
    void *parameters[] = {&to, &from, &number};
    struct phos_touches touches;
    touch_cuLaunchKernel(&touches, function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
    int at = snprintf(text, sizeof text, "%s %llu %u %u", touches.kernel ? touches.kernel : "?",
                      (unsigned long long)touches.module, touches.source, touches.anything);
    for (size_t i = 0; i < touches.count; i++)
        at += snprintf(text + at, sizeof text - (size_t)at, " %llx:%u", (unsigned long long)(touches.list[i].address - LOW),
                       touches.list[i].access);
    phos_touches_end(&touches);
    return text;
}

static void expect(const char *is, const char *must, const char *what)
{
    if (strcmp(is, must)) {
        printf("%s: %s, not %s\n", what, is, must);
        exit(1);
    }
}

/* A table that says of one kernel that it writes through its first argument and reads through its second. */
static void table(uint64_t module, const char *name)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const char *c = name; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 0x100000001b3ull;
    struct {
        struct phos_access_header header;
        struct phos_access_kernel kernel;
        struct phos_access_parameter parameters[3];
        struct phos_access_field fields[2];
    } t = {{PHOS_ACCESS_MAGIC, 1, 3, 2, 0},
           {.module = module, .name_hash = hash, .parameters = 3, .fields = 2, .block_size = 20},
           {{0, 8}, {8, 8}, {16, 4}},
           {{.offset = 0, .size = 8, .access = PHOS_WRITES}, {.offset = 8, .size = 8, .access = PHOS_READS}}};
    int file = memfd_create("table", MFD_CLOEXEC);
    check(write(file, &t, sizeof t) == sizeof t, "no table");
    const char *problem = phos_access_table_take(file);
    check(!problem, problem ? problem : "");
    close(file);
}

/* Another module with the same kernels comes and goes. */
static void comes_and_goes(void)
{
    CUmodule module = module_new(5);
    CUfunction function = function_new(module, "meanwhile");
    check(serve_cuModuleUnload(module) == CUDA_SUCCESS, "no unloading");
    free(function);
    free(module);
}

static void kernels(void)
{
    CUmodule module = module_new(5);
    CUfunction function = function_new(module, "work");
    expect(launched(function, LOW + 1, 99), "work 5 3 0 1:3", "by layout");
    table(5, "work");
    expect(launched(function, LOW + 1, LOW + 2), "work 5 0 0 1:2 2:1", "by descriptor");
    expect(launched(function_new(module, "rest"), LOW + 1, LOW + 2), "rest 5 3 0 1:3 2:3", "without a descriptor");

    /* An address in two parameters, and two that have a gap between them. */
    uint64_t address = LOW + 3;
    void *halves[] = {&address, (char *)&address + 4, &address};
    struct phos_arguments passed = {.parameters = halves};
    struct phos_access_parameter places[] = {{0, 4}, {4, 4}, {16, 8}};
    struct phos_look look = {.arguments = &passed, .parameters = places, .count = 3, .low = LOW, .high = LOW + 16};
    struct phos_touches touches;
    phos_touches_begin(&touches, NULL);
    for (uint32_t at = 0; at <= 16; at += 4)
        phos_look_field(&touches, &look, &(struct phos_access_field){.offset = at, .size = 8, .access = PHOS_WRITES});
    check(touches.count == 2 && touches.list[0].address == address && touches.list[1].address == address, "halves");
    phos_touches_end(&touches);

    /* Obtained past us. */
    struct thing hidden = {"work", (struct thing *)module, false};
    expect(launched((CUfunction)&hidden, LOW + 1, LOW + 2), "work 5 0 0 1:2 2:1", "a function that was not seen");
    struct thing asked = {"meanwhile", (struct thing *)module, false};
    driver_meanwhile = comes_and_goes;
    expect(launched((CUfunction)&asked, LOW + 1, LOW + 2), "meanwhile 5 3 0 1:3 2:3", "one that goes under another handle too");
    CUlibrary library = malloc(16);
    phos_functions_library(library, 5);
    struct thing kernel = {"work", (struct thing *)library, true};
    expect(launched((CUfunction)&kernel, LOW + 1, LOW + 2), "work 5 0 0 1:2 2:1", "a kernel that was not seen");
    CUkernel seen;
    serve_cuLibraryGetKernel(&seen, library, "work");
    expect(launched((CUfunction)seen, LOW + 1, LOW + 2), "work 5 0 0 1:2 2:1", "a kernel passed as a function");

    /* The same handles, of another library: those that the driver gives for a graph's nodes, and those of its module. */
    CUmodule part;
    serve_cuLibraryGetModule(&part, library);
    CUfunction of_part = function_new(part, "work");
    struct thing of_node = {"work", (struct thing *)malloc(16), false};
    expect(launched((CUfunction)&of_node, LOW + 1, LOW + 2), "work 0 3 0 1:3 2:3", "a function of a module that was not seen");
    expect(launched(of_part, LOW + 1, LOW + 2), "work 5 0 0 1:2 2:1", "a function of a library's module");
    struct thing stays = {"alone", of_node.holder, false};
    expect(launched((CUfunction)&stays, LOW + 1, LOW + 2), "alone 0 3 0 1:3 2:3", "one that the library has no kernel like");
    serve_cuLibraryUnload(library);
    stays.name = of_node.name = ((struct thing *)of_part)->name = "other";
    expect(launched((CUfunction)&stays, LOW + 1, LOW + 2), "alone 0 3 0 1:3 2:3", "the same, which is not asked for again");
    expect(launched((CUfunction)&of_node, LOW + 1, LOW + 2), "other 0 3 0 1:3 2:3", "a node's after its library was unloaded");
    expect(launched(of_part, LOW + 1, LOW + 2), "other 0 3 0 1:3 2:3", "a module's after its library was unloaded");
    expect(launched(function, LOW + 1, LOW + 2), "work 5 0 0 1:2 2:1", "another module's");

    /* The same handles, of another module: nothing of the former may be left. */
    serve_cuModuleUnload(module);
    ((struct thing *)function)->name = "other";
    expect(launched(function, LOW + 1, LOW + 2), "other 0 3 0 1:3 2:3", "after its module was unloaded");
    phos_functions_module(module, 6);
    phos_functions_context_ends(CONTEXT);
    ((struct thing *)function)->name = "third";
    expect(launched(function, LOW + 1, LOW + 2), "third 0 3 0 1:3 2:3", "after its context ended");
}

static CUgraphExec exec_new(struct graph *graph)
{
    CUgraphExec executable;
    serve_cuGraphInstantiateWithFlags(&executable, (CUgraph)graph, 0);
    return executable;
}

static const char *graph_launched(CUgraphExec executable)
{
    static __thread char text[512];
    struct phos_touches touches;
    touch_cuGraphLaunch(&touches, executable, NULL);
    int at = snprintf(text, sizeof text, "%u", touches.anything);
    for (size_t i = 0; i < touches.count; i++)
        at += snprintf(text + at, sizeof text - (size_t)at, " %llx:%zu:%u",
                       (unsigned long long)(touches.list[i].address - LOW), touches.list[i].size, touches.list[i].access);
    phos_touches_end(&touches);
    return text;
}

static struct node *node_add(struct graph *graph, CUgraphNodeType type)
{
    struct node *node = &graph->nodes[graph->count++];
    *node = (struct node){.type = type};
    return node;
}

static struct node *kernel_add(struct graph *graph, CUfunction function, uint64_t to, uint64_t from)
{
    struct node *node = node_add(graph, CU_GRAPH_NODE_TYPE_KERNEL);
    node->function = function;
    memcpy(node->values, (uint64_t[3]){to, from, 0}, sizeof node->values);
    for (int i = 0; i < 3; i++)
        node->parameters[i] = &node->values[i];
    return node;
}

/* CUDA 13.5's nodes of many copies, and what a stream's atomic operations of 13.1 touch. */
static void batches(void)
{
    struct graph graph = {0};
    struct node *flat = node_add(&graph, CU_GRAPH_NODE_TYPE_MEMCPY_BATCH);
    expect(graph_launched(exec_new(&graph)), "3", "copies that the driver does not tell of");
    CUdeviceptr to[] = {LOW + 0x10, LOW + 0x20}, from[] = {LOW + 0x30, LOW + 0x40}, later[] = {LOW + 0x50, LOW + 0x60};
    size_t sizes[] = {4, 0};
    flat->all.type = CU_GRAPH_NODE_TYPE_MEMCPY_BATCH;
    flat->all.memcpyBatch = (CUDA_MEMCPY_BATCH_NODE_PARAMS){.count = 2, .dsts = to, .srcs = from, .sizes = sizes};
    CUgraphExec executable = exec_new(&graph);
    expect(graph_launched(executable), "0 10:4:2 30:4:1", "copies, one of them switched off");
    CUgraphNodeParams p = flat->all;
    p.memcpyBatch.dsts = later;
    p.memcpyBatch.sizes = (size_t[]){8, 8};
    serve_cuGraphExecNodeSetParams(executable, (CUgraphNode)flat, &p);
    expect(graph_launched(executable), "0 30:8:1 40:8:1 50:8:2 60:8:2", "copies that were changed");
    serve_cuGraphNodeSetEnabled(executable, (CUgraphNode)flat, 0);
    expect(graph_launched(executable), "0", "copies that were disabled");

    struct graph fabric = {0};
    struct node *node = node_add(&fabric, CU_GRAPH_NODE_TYPE_FABRIC_CPY_BATCH);
    CUDA_FABRIC_COPY_BATCH_OP copy = {.size = 16};
    copy.src.type = copy.dst.type = CU_FABRIC_COPY_OPERAND_TYPE_POINTER;
    copy.src.op.ptr.ptr = LOW + 1;
    copy.dst.op.ptr.ptr = LOW + 2;
    node->all.type = CU_GRAPH_NODE_TYPE_FABRIC_CPY_BATCH;
    node->all.fabricCpyBatch = (CUDA_FABRIC_CPY_BATCH_NODE_PARAMS){.numOps = 1, .opList = &copy};
    executable = exec_new(&fabric);
    expect(graph_launched(executable), "0 1:16:1 2:16:2", "copies over a fabric");
    copy.dst.type = CU_FABRIC_COPY_OPERAND_TYPE_LOGICAL_ENDPOINT;
    p = node->all;
    serve_cuGraphExecNodeSetParams(executable, (CUgraphNode)node, &p);
    expect(graph_launched(executable), "2 1:16:1", "copies to an endpoint");

    struct graph operations = {0};
    struct node *reduction = node_add(&operations, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);
    reduction->operation.atomicReduction = (struct CUstreamMemOpAtomicReductionParams_st){
        .operation = CU_STREAM_MEM_OP_ATOMIC_REDUCTION, .dataType = CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64, .address = LOW + 8};
    expect(graph_launched(exec_new(&operations)), "0 8:8:3", "a reduction");
    reduction->operation.atomicReduction.dataType = CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_32;
    expect(graph_launched(exec_new(&operations)), "0 8:4:3", "a reduction of half the size");
    reduction->operation.atomicReduction.dataType = (CUstreamAtomicReductionDataType)CU_ATOMIC_CAPABILITY_SCALAR_128;
    expect(graph_launched(exec_new(&operations)), "3", "a reduction of an unknown size");
}

static void graphs(void)
{
    batches();
    CUmodule module = module_new(1);
    CUfunction work = function_new(module, "work");
    struct graph inner = {0}, other = {0}, outer = {0};
    kernel_add(&inner, work, LOW + 0x10, LOW + 0x20);
    struct node *deep = node_add(&other, CU_GRAPH_NODE_TYPE_GRAPH);
    deep->child = &inner;
    kernel_add(&outer, work, LOW + 1, LOW + 2);
    kernel_add(&outer, work, LOW + 1, LOW + 3);
    struct node *child = node_add(&outer, CU_GRAPH_NODE_TYPE_GRAPH);
    child->child = &other;
    node_add(&outer, CU_GRAPH_NODE_TYPE_HOST);
    struct node *operations = node_add(&outer, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);
    operations->operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    operations->operation.writeValue.address = LOW + 0x30;
    CUgraphExec executable = exec_new(&outer);
    expect(graph_launched(executable), "0 1:0:3 2:0:3 3:0:3 10:0:3 20:0:3 30:4:2", "a graph with graphs in it");
    table(1, "work");
    expect(graph_launched(executable), "0 1:0:2 2:0:1 3:0:1 10:0:2 20:0:1 30:4:2", "the same with descriptors");

    /* What was in the child graph, two deep, goes. Twice, so that what was added goes as well. */
    struct graph fresh = {0};
    kernel_add(&fresh, work, LOW + 0x40, LOW + 0x50);
    for (int i = 0; i < 2; i++) {
        serve_cuGraphExecChildGraphNodeSetParams(executable, (CUgraphNode)child, (CUgraph)&fresh);
        expect(graph_launched(executable), "0 1:0:2 2:0:1 3:0:1 30:4:2 40:0:2 50:0:1", "another child graph");
    }
    /* Two of them that were given one and the same graph, with a graph in it: what is in the other stays. */
    struct graph twice = {0};
    struct node *one = node_add(&twice, CU_GRAPH_NODE_TYPE_GRAPH), *two = node_add(&twice, CU_GRAPH_NODE_TYPE_GRAPH);
    one->child = two->child = &fresh;
    CUgraphExec shared = exec_new(&twice);
    for (int i = 0; i < 2; i++) {
        serve_cuGraphExecChildGraphNodeSetParams(shared, (CUgraphNode)one, (CUgraph)&other);
        serve_cuGraphExecChildGraphNodeSetParams(shared, (CUgraphNode)two, (CUgraph)&other);
        expect(graph_launched(shared), "0 10:0:2 20:0:1", "two children that are one graph");
        serve_cuGraphExecChildGraphNodeSetParams(shared, (CUgraphNode)(i ? two : one), (CUgraph)&fresh);
        expect(graph_launched(shared), "0 10:0:2 20:0:1 40:0:2 50:0:1", "one of two children that were one graph");
    }
    serve_cuGraphExecDestroy(shared);
    /* Of a node that we do not know, both. */
    struct graph unknown = {0};
    struct node *foreign = node_add(&unknown, CU_GRAPH_NODE_TYPE_MEMSET);
    CUgraphNodeParams p = {.type = CU_GRAPH_NODE_TYPE_MEMSET};
    p.memset.dst = LOW + 0x60;
    p.memset.elementSize = 4;
    p.memset.width = 8;
    p.memset.height = 1;
    serve_cuGraphExecNodeSetParams(executable, (CUgraphNode)foreign, &p);
    expect(graph_launched(executable), "0 1:0:2 2:0:1 3:0:1 30:4:2 40:0:2 50:0:1 60:32:2", "a node of another graph");
    serve_cuGraphExecUpdate_v2(executable, (CUgraph)&fresh, NULL);
    expect(graph_launched(executable), "0 40:0:2 50:0:1", "a graph that was updated as a whole");

    /* Both branches of a condition; one that nobody told us of may do anything. */
    struct graph branches = {0};
    struct node *conditional = node_add(&branches, CU_GRAPH_NODE_TYPE_CONDITIONAL);
    expect(graph_launched(exec_new(&branches)), "3", "an unknown conditional node");
    CUgraph bodies[2] = {(CUgraph)&fresh, (CUgraph)&inner};
    CUgraphNodeParams c = {.type = CU_GRAPH_NODE_TYPE_CONDITIONAL};
    c.conditional.size = 2;
    c.conditional.phGraph_out = bodies;
    phos_graph_node_added((CUgraph)&branches, (CUgraphNode)conditional, &c);
    expect(graph_launched(exec_new(&branches)), "0 10:0:2 20:0:1 40:0:2 50:0:1", "both branches");
    serve_cuGraphDestroy((CUgraph)&branches);
    expect(graph_launched(exec_new(&branches)), "3", "a conditional node of a graph that is gone");

    struct graph updatable = {0};
    struct node *changing = kernel_add(&updatable, work, LOW + 1, LOW + 2);
    changing->updatable = true;
    CUgraphExec changed = exec_new(&updatable);
    expect(graph_launched(changed), "3 1:0:2 2:0:1", "a node that kernels change");
    uint64_t values[] = {LOW + 4, LOW + 5, 0};
    void *pointers[] = {&values[0], &values[1], &values[2]};
    CUgraphNodeParams k = {.type = CU_GRAPH_NODE_TYPE_KERNEL};
    k.kernel.func = work;
    k.kernel.kernelParams = pointers;
    serve_cuGraphExecNodeSetParams(changed, (CUgraphNode)changing, &k);
    expect(graph_launched(changed), "3 4:0:2 5:0:1", "a node that kernels change, changed by the host");
    serve_cuGraphNodeSetEnabled(changed, (CUgraphNode)changing, 0);
    expect(graph_launched(changed), "3 4:0:2 5:0:1", "a node that the host disabled and kernels may enable");
    struct graph fixed = {0};
    struct node *off = kernel_add(&fixed, work, LOW + 1, LOW + 2);
    CUgraphExec disabled = exec_new(&fixed);
    serve_cuGraphNodeSetEnabled(disabled, (CUgraphNode)off, 0);
    expect(graph_launched(disabled), "0", "a node that only the host can enable");
    serve_cuGraphNodeSetEnabled(disabled, (CUgraphNode)off, 1);
    expect(graph_launched(disabled), "0 1:0:2 2:0:1", "a node that it enabled");
    struct graph strange = {0};
    node_add(&strange, (CUgraphNodeType)77);
    expect(graph_launched(exec_new(&strange)), "3", "a node of an unknown kind");
    expect(graph_launched((CUgraphExec)&strange), "3", "a graph that was made past us");
    serve_cuGraphExecDestroy(executable);

    CUgraphExec on_device;
    executable = exec_new(&fresh);
    serve_cuGraphInstantiateWithFlags(&on_device, (CUgraph)&inner, CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH);
    expect(graph_launched(executable), "3", "while kernels can launch graphs");
    serve_cuGraphExecDestroy(on_device);
    expect(graph_launched(executable), "0 40:0:2 50:0:1", "when they cannot any more");

    /* Memory that is mapped later, where there was none when it was worked out. */
    struct graph far = {0};
    kernel_add(&far, function_new(module, "rest"), LOW + (4ull << 30), LOW);
    executable = exec_new(&far);
    expect(graph_launched(executable), "0 0:0:3", "an address without memory");
    struct phos_range more = {LOW + (4ull << 30), 1 << 21};
    phos_ranges_add(&phos_mappings, &more);
    expect(graph_launched(executable), "0 0:0:3 100000000:0:3", "an address that got memory");
}

static const char *map_launched(CUfunction function, const CUtensorMap *map)
{
    static char text[128];
    void *parameters[] = {(void *)map};
    struct phos_touches touches;
    touch_cuLaunchKernel(&touches, function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
    int at = snprintf(text, sizeof text, "%u", touches.anything);
    for (size_t i = 0; i < touches.count; i++)
        at += snprintf(text + at, sizeof text - (size_t)at, " %llx:%u", (unsigned long long)(touches.list[i].address - LOW),
                       touches.list[i].access);
    phos_touches_end(&touches);
    return text;
}

static void tensors(void)
{
    CUfunction function = function_new(module_new(3), "map");
    CUtensorMap map;
    memset(&map, 0, sizeof map);
    expect(map_launched(function, &map), "0", "no tensor map");
    serve_cuTensorMapReplaceAddress(&map, (void *)(uintptr_t)(LOW + 0x100));
    CUtensorMap first = map;
    expect(map_launched(function, &map), "0 100:3", "a tensor map");
    serve_cuTensorMapReplaceAddress(&map, (void *)(uintptr_t)(LOW + 0x200));
    expect(map_launched(function, &map), "0 200:3", "a tensor map with another address");
    expect(map_launched(function, &first), "0 100:3", "the former one");
    serve_cuTensorMapSetAllocationClass(&map, CU_TENSOR_MAP_ALLOC_CLASS_LARGE, NULL);
    expect(map_launched(function, &map), "0 200:3", "a tensor map of another class");
    serve_cuTensorMapSetAllocationClass(&map, CU_TENSOR_MAP_ALLOC_CLASS_AUTO, NULL);
    expect(map_launched(function, &map), "0", "a tensor map that the driver has not changed");
    memset(&map, 1, sizeof map);
    serve_cuTensorMapSetAllocationClass(&map, CU_TENSOR_MAP_ALLOC_CLASS_SMALL, NULL);
    expect(map_launched(function, &map), "0", "a tensor map that nobody saw made");
    /* Many more than are kept: the latest are. */
    for (uint64_t i = 0; i < 100000; i++)
        serve_cuTensorMapReplaceAddress(&map, (void *)(uintptr_t)(LOW + i * 64));
    for (uint64_t i = 99000; i < 100000; i++) {
        CUdeviceptr address;
        phos_real.cuTensorMapReplaceAddress(&map, (void *)(uintptr_t)(LOW + i * 64));
        check(phos_tensor_map_find(&map, &address) && address == LOW + i * 64, "a recent tensor map was forgotten");
    }
}

static atomic_bool stop;

static void *launch_storm(void *argument)
{
    CUmodule module = module_new(10 + (uint64_t)(uintptr_t)argument);
    while (!atomic_load(&stop)) {
        CUfunction function = function_new(module, "work");
        for (int i = 0; i < 20; i++)
            launched(function, LOW + 1, LOW + 2);
        serve_cuModuleUnload(module);
        free((void *)function);
        phos_functions_module(module, 10 + (uint64_t)(uintptr_t)argument);
    }
    return NULL;
}

static struct graph storm_graph;
static _Atomic(CUgraphExec) storm_exec;

static void *graph_storm(void *argument)
{
    (void)argument;
    while (!atomic_load(&stop)) {
        const char *text = graph_launched(atomic_load(&storm_exec));
        check(!strncmp(text, "0 1:0:", 6), text);
    }
    return NULL;
}

static bool told_to(uint64_t module, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        check(module && !strcmp(names[i], "work"), "another kernel was told of");
    return true;
}

static void storm(void)
{
    pthread_t threads[5];
    kernel_add(&storm_graph, function_new(module_new(1), "work"), LOW + 1, LOW + 2);
    atomic_store(&storm_exec, exec_new(&storm_graph));
    for (int i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, launch_storm, (void *)(intptr_t)i);
    for (int i = 3; i < 5; i++)
        pthread_create(&threads[i], NULL, graph_storm, NULL);
    for (int round = 0; round < 400; round++) {
        table(1 + (uint64_t)round % 12, "work");
        serve_cuGraphExecUpdate_v2(atomic_load(&storm_exec), (CUgraph)&storm_graph, NULL);
        if (round % 10 == 0)
            phos_kernels_untell();
        phos_kernels_tell(100, told_to);
        usleep(500);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < 5; i++)
        pthread_join(threads[i], NULL);
}

static void cost(void)
{
    CUmodule module = module_new(1);
    CUfunction functions[1000];
    static char names[1000][24];
    for (int i = 0; i < 1000; i++) {
        snprintf(names[i], sizeof names[i], "kernel%d", i);
        functions[i] = function_new(module, names[i]);
    }
    table(1, "kernel500");
    uint64_t to = LOW + 1, from = LOW + 2;
    uint32_t number = 7;
    void *parameters[] = {&to, &from, &number};
    struct timespec a, b;
    double best = 1e9;
    for (int round = 0; round < 20; round++) {
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (int i = 0; i < 1000; i++) {
            struct phos_touches touches;
            touch_cuLaunchKernel(&touches, functions[i], 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
            phos_touches_end(&touches);
        }
        clock_gettime(CLOCK_MONOTONIC, &b);
        double spent = (double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec);
        best = spent / 1000 < best ? spent / 1000 : best;
    }
    printf("%.1f\n", best);
}

int main(int count, char **arguments)
{
    const char *what = count > 1 ? arguments[1] : "";
    driver_install();
    if (!strcmp(what, "kernels"))
        kernels();
    else if (!strcmp(what, "graphs"))
        graphs();
    else if (!strcmp(what, "tensors"))
        tensors();
    else if (!strcmp(what, "storm"))
        storm();
    else if (!strcmp(what, "cost"))
        cost();
    else
        return 2;
    return 0;
}
