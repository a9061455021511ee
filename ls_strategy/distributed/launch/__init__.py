"""How the processes of a run start, meet and end: launchers, the rendezvous port, and SLURM's view of the job."""
