#!/bin/sh
# Everything that needs the GPU, on FOLDER, with the results and logs in OUT. Run it where `bench` is.
set -u
folder=$1 out=$2
python3 -m bench.replay.assemble "$folder/timed" && python3 -m bench.replay.assemble "$folder/small"
python3 -m bench.replay.sanitize "$folder/small" --log "$out/sanitize.log" | tee "$out/sanitize.txt"
python3 -m bench.replay.attention "$folder/timed" --save "$out/attention.json" | tee "$out/attention.txt"
python3 -m bench.replay.decode "$folder/timed" --save "$out/decode.json" | tee "$out/decode.txt"
