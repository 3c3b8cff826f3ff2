/* A program that knows nothing of CUDA and loads a module that does, for itself alone. */
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **arguments) {
    void *module = dlopen("libworkload.so", RTLD_NOW | RTLD_LOCAL);
    int (*workload)(int, char **) = module ? dlsym(module, "workload") : NULL;
    if (!workload) {
        fprintf(stderr, "loader: %s\n", dlerror());
        return 4;
    }
    return workload(count, arguments);
}
