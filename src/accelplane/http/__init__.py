"""HTTP/1.1: a server for untrusted clients and a client for one server, with or without TLS."""
