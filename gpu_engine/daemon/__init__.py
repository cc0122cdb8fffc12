"""phosd: sessions with frontends, the physical-memory broker, and the server that ties them to the protocols."""
