/* Passes a message around a ring of ranks, and says how long the slowest step takes. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TURNS = 20 };

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: ring BYTES\n");
        return 2;
    }
    int rank, ranks, bytes = atoi(argv[1]);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks, right = 1;
    char *own = malloc(bytes), *got = malloc(bytes);
    for (int turn = 0; turn < TURNS; turn++) {
        memset(own, rank + turn, bytes);
        MPI_Barrier(MPI_COMM_WORLD);
        double time = MPI_Wtime(), slowest;
        MPI_Sendrecv(own, bytes, MPI_CHAR, next, 0, got, bytes, MPI_CHAR, before, 0,
                     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        time = MPI_Wtime() - time;
        right &= got[0] == (char)(before + turn) && got[bytes - 1] == (char)(before + turn);
        MPI_Reduce(&time, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0)
            printf("step %.3f us\n", 1e6 * slowest);
    }
    int all = 0;
    MPI_Reduce(&right, &all, 1, MPI_INT, MPI_LAND, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("valid: %s\n", all ? "yes" : "no");
    MPI_Finalize();
    return 0;
}
