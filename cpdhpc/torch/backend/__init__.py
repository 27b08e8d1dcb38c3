"""A backend of torch.distributed over MPI, named "cpdhpc", and the store of init_method="mpi://".

registration makes it known; start finds the members of a group; group has torch's methods; programs
says what each rank sends, receives and adds; channel has the messages; progress moves calls on.
"""

NAME = "cpdhpc"
