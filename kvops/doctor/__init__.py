"""Checks of a host, live or captured: will KV really move by RDMA?"""
