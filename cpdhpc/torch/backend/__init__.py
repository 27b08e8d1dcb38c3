"""A backend of torch.distributed over MPI, named "cpdhpc", and the store of init_method="mpi://".

registration registers it with torch; start creates groups; group has torch's methods; programs has
the messages and sums of each collective; channel carries messages; progress advances calls.
"""

NAME = "cpdhpc"
