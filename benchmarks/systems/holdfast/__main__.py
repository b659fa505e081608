from benchmarks.systems.holdfast import VERBS
from benchmarks.systems.process import main
from holdfast.worker import process

main(VERBS, process.run)
