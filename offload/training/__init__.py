"""Learning which heads retrieve (LycheeDecode): `offload train-heads`."""
