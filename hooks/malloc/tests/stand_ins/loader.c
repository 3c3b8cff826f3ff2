/* Runs the workload: linked at the start of the program, so that its libraries are everyone's, or (LOADS) loaded later and
 * privately by a program that knows nothing of CUDA, as Python does. */
#include <dlfcn.h>
#include <stdio.h>

int workload(int count, char **arguments);

int main(int count, char **arguments) {
#ifdef LOADS
    void *module = dlopen("libworkload.so", RTLD_NOW | RTLD_LOCAL);
    int (*workload)(int, char **) = module ? dlsym(module, "workload") : NULL;
    if (!workload) {
        fprintf(stderr, "loader: %s\n", dlerror());
        return 4;
    }
#endif
    return workload(count, arguments);
}
