"""Will this host really move KV by RDMA: checks, captures and a probe."""
