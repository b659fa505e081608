from benchmarks.systems.process import main
from benchmarks.systems.raw import VERBS
from holdfast.worker import process

main(VERBS, process.run)
