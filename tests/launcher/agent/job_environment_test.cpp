// Tests of the jobs of SLURM and of MPI in which `accelmgr spawn` finds itself.
#include "launcher/agent/job_environment.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"

namespace accelmgr::agent {
namespace {

using test::message_of;
using testing::ElementsAre;
using testing::HasSubstr;
using Environment = std::map<std::string, std::string>;

const Environment of_srun{{"SLURM_STEP_NUM_TASKS", "3"},
                          {"SLURM_STEP_NUM_NODES", "3"},
                          {"SLURM_PROCID", "2"},
                          {"SLURM_STEP_NODELIST", "gpu[09-11]"},
                          {"SLURM_JOB_ID", "4007"}};

TEST(Nodes, AreReadAsSlurmWritesThem) {
  EXPECT_THAT(nodes_in("a"), ElementsAre("a"));
  EXPECT_THAT(nodes_in("a,b-1"), ElementsAre("a", "b-1"));
  EXPECT_THAT(nodes_in("n[09-11,7],m[1].rack"), ElementsAre("n09", "n10", "n11", "n7", "m1.rack"));
  for (const auto* list : {"", "a,", "n[1", "n[x]", "n[3-1]", "n[]"})
    EXPECT_THAT(message_of<ConfigError>([&] { nodes_in(list); }), HasSubstr("not a list of nodes")) << list;
}

TEST(JobOf, SrunHasItsNodesAndTheFirstIsTheRendezvous) {
  EXPECT_EQ(job_of(of_srun), (Job{3, 2, "gpu09:29407", "SLURM_STEP_NUM_TASKS"}));
}

TEST(JobOf, ABatchScriptWithoutSrunIsNone) {
  EXPECT_EQ(job_of({{"SLURM_NNODES", "3"}, {"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}}), std::nullopt);
  EXPECT_EQ(job_of({}), std::nullopt);
}

TEST(JobOf, MpiHasItsRanksAndNoRendezvous) {
  EXPECT_EQ(job_of({{"OMPI_COMM_WORLD_SIZE", "2"},
                    {"OMPI_COMM_WORLD_RANK", "1"},
                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}}),
            (Job{2, 1, "", "OMPI_COMM_WORLD_SIZE"}));
  EXPECT_EQ(job_of({{"PMI_SIZE", "2"}, {"PMI_RANK", "0"}}), (Job{2, 0, "", "PMI_SIZE"}));
  EXPECT_EQ(job_of({{"PMI_SIZE", "1"}, {"PMI_RANK", "0"}}), std::nullopt);
}

TEST(JobOf, MpirunInAJobOfSlurmHasTheRanksOfMpi) {
  auto daemons = of_srun;  // mpirun has started its daemons with srun; the one on its own node not.
  daemons["OMPI_COMM_WORLD_SIZE"] = "4";
  daemons["OMPI_COMM_WORLD_RANK"] = "3";
  daemons["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";
  EXPECT_EQ(job_of(daemons), (Job{4, 3, "", "OMPI_COMM_WORLD_SIZE"}));
  auto hydra = of_srun;
  hydra["PMI_SIZE"] = "6";
  hydra["PMI_RANK"] = "5";
  hydra["MPI_LOCALNRANKS"] = "2";
  EXPECT_THAT(message_of<ConfigError>([&] { job_of(hydra); }), HasSubstr("PMI_SIZE=6: the job has several"));
  hydra.erase("MPI_LOCALNRANKS");  // As `srun --mpi=pmi2` sets them.
  EXPECT_EQ(job_of(hydra), job_of(of_srun));
}

TEST(JobOf, NodeZeroIsTheFirstNodeOfTheListAlsoWhereItHasNotTaskZero) {
  auto dealt = of_srun;
  dealt["SLURM_NODEID"] = "0";
  EXPECT_EQ(job_of(dealt)->node_rank, 0);
}

TEST(JobOf, AVariableThatIsMissingOrOutOfRangeIsNamedWithWhatWouldBeRight) {
  const auto refused = [](const char* name, const char* value) {
    auto wrong = of_srun;
    wrong.erase(name);
    if (*value != '\0') wrong[name] = value;
    return message_of<ConfigError>([&] { job_of(wrong); });
  };
  EXPECT_THAT(refused("SLURM_PROCID", ""), HasSubstr("SLURM_STEP_NUM_TASKS is set, but SLURM_PROCID is not"));
  EXPECT_THAT(refused("SLURM_STEP_NUM_NODES", ""), HasSubstr("SLURM_STEP_NUM_NODES is not"));
  EXPECT_THAT(refused("SLURM_PROCID", "3"), HasSubstr("SLURM_PROCID=3: it must be from 0 to 2, because "
                                                      "SLURM_STEP_NUM_TASKS is 3"));
  EXPECT_THAT(refused("SLURM_NODEID", "7"), HasSubstr("SLURM_NODEID=7: it must be from 0 to 2"));
  EXPECT_THAT(refused("SLURM_PROCID", "-1"),
              HasSubstr("SLURM_PROCID=-1: it must be a whole number, 0 or more"));
}

TEST(JobOf, SeveralProcessesOnANodeAreRefused) {
  auto crowded = of_srun;
  crowded["SLURM_STEP_NUM_TASKS"] = "6";
  EXPECT_THAT(message_of<ConfigError>([&] { job_of(crowded); }), HasSubstr("--ntasks-per-node=1"));
  EXPECT_THAT(message_of<ConfigError>([] {
                job_of({{"OMPI_COMM_WORLD_SIZE", "4"},
                        {"OMPI_COMM_WORLD_RANK", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
              }),
              HasSubstr("OMPI_COMM_WORLD_SIZE=4"));
  EXPECT_THAT(message_of<ConfigError>([] {
                job_of({{"PMI_SIZE", "two"}, {"PMI_RANK", "0"}});
              }),
              HasSubstr("PMI_SIZE=two: it must be a whole number"));
}

}  // namespace
}  // namespace accelmgr::agent
