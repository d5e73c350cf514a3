#!/bin/sh
# Everything that needs the GPU, on FOLDER, with the results in OUT. Run it where `bench` is.
set -u
folder=$1 out=$2
python3 -m bench.replay.assemble "$folder"
python3 -m bench.replay.attention "$folder" --save "$out/attention.json" | tee "$out/attention.txt"
python3 -m bench.replay.decode "$folder" --save "$out/decode.json" | tee "$out/decode.txt"
